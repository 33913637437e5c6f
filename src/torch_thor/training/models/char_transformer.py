"""A small transformer that predicts the next character."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, DEPTH = 64, 4, 2


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block.

        Args:
            x: (N, L, WIDTH).

        Returns:
            (N, L, WIDTH).
        """
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        deeper: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return deeper


class CharTransformer(nn.Module):
    """A transformer that returns the logits of the next character.

    Args:
        symbols: Number of different characters.
        context: Largest length of a window, in characters.
    """

    def __init__(self, symbols: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(symbols, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of the next character at each position.

        Args:
            x: Character codes, (N, L), int64, where L is at most `context`.

        Returns:
            Logits, (N, L, symbols).
        """
        places = self.places(torch.arange(x.shape[1], device=x.device))
        scores: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + places)))
        return scores
