"""``nn.Embedding``: a linear layer on one-hot rows, whose A is diagonal (token frequencies).

Subclasses in model libraries (``GemmaTextScaledWordEmbedding``, ``BartScaledWordEmbedding``)
multiply the vectors by a number, ``embed_scale``. The gradient of a vector is then that number
times the gradient of the output.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.kinds.matrix import MatrixWeight
from torch_thor.curvature.kinds.registry import owner_of_forward


class EmbeddingKind(MatrixWeight):
    """``nn.Embedding``: the rows ``a`` are one-hot, so A = diag(count / R).

    No row is formed.
    """

    label = "Embedding"
    diagonal_input = True
    transposed = True

    def __init__(self, module: Any, *, scaled: bool = False) -> None:
        # the module if its output is ``embed_scale`` times the vectors
        self._scaled = module if scaled else None
        self.inputs, self.outputs = module.num_embeddings, module.embedding_dim
        self._padding = module.padding_idx

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of ``x``, 1 for a single token."""
        return x.shape[0] if x.dim() else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the shape of the input: every token is a row."""
        return x.shape

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Count the tokens."""
        tokens = self._real(x.reshape(-1), x, keep)
        # bincount would wait for the device
        counts = a.rows.view(-1)
        counts.index_add_(0, tokens, counts.new_ones(()).expand(len(tokens)))
        return len(tokens)

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the gradients of the vectors."""
        rows = self._real(grad.reshape(-1, self.outputs), x, keep)
        scale = 1.0 if self._scaled is None else self._scaled.embed_scale
        g.add_second_moment_((rows.to(g.rows.dtype) * scale).mT[None])

    def _real(self, rows: Tensor, x: Tensor, keep: Tensor | None) -> Tensor:
        """Return the rows of tokens that count: those that are kept and no padding."""
        if self._padding is not None:
            real = x != self._padding
            keep = real if keep is None else keep & real
        return rows if keep is None else rows[keep.reshape(-1)]


def is_scaled(module: nn.Module) -> bool:
    """Return whether a module is an embedding, as of transformers, that has an ``embed_scale``."""
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    is_named_so = owner_of_forward(module).__name__.endswith("ScaledWordEmbedding")
    return is_named_so and parameters == ["weight"] and hasattr(module, "embed_scale")
