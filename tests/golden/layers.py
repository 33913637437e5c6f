"""A small network with a layer of every kind that THOR knows, and what it is trained on."""

import math

import torch
from sklearn.datasets import load_digits
from timm.layers import Conv2dSame, ScaledStdConv2d
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

TEXT = """
The trace of a layer's curvature tells when it has changed. Where it has changed by much, \
the layer takes new factors;
where it has changed by little, it keeps what it has; and where it has hardly changed at all, \
it stops for good. Between
two refreshes a step is as cheap as one of gradient descent with momentum, \
for nothing is gathered on the way.
"""
VOCABULARY, WIDTH, EXPERTS, LENGTH, BATCH = 64, 16, 3, 12, 12
PADDING = 0  # the space, which is no word either


class ScaledWordEmbedding(nn.Embedding):
    """An embedding that scales what it looks up, as several language models have it."""

    embed_scale = 2.0

    def forward(self, tokens):
        return super().forward(tokens) * self.embed_scale


class Experts(nn.Module):
    """Linear layers in one 3-d weight; each sees the rows that are sent to it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))

    def forward(self, x, chosen):
        """Send each row (R, WIDTH) to the expert that is chosen for it (R,)."""
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            y[chosen == e] = F.linear(x[chosen == e], self.weight[e])
        return y + self.bias[chosen]


class EveryLayer(nn.Module):
    """Next characters of a text, given what came before and a picture."""

    def __init__(self):
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Conv2d(4, 8, 3, groups=2),
            nn.GELU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            ScaledStdConv2d(8, 8, 1),
            nn.GELU(),
            Conv2dSame(8, 6, 3, stride=2),
            nn.Tanh(),
            nn.ConvTranspose2d(6, 4, 2, stride=2),
            nn.GroupNorm(2, 4),
        )
        self.line = nn.Conv1d(4, 6, 3, padding=1)
        self.volume = nn.Conv3d(1, 2, (2, 3, 3))
        self.from_picture = nn.Linear(6 * 36 + 2 * 3 * 4 * 4, WIDTH)
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = ScaledWordEmbedding(LENGTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = Conv1D(2 * WIDTH, WIDTH), Conv1D(WIDTH, 2 * WIDTH)
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gates = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.dropout = nn.Dropout(0.1)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))  # of no layer
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, images, tokens):
        """Scores (N, L, VOCABULARY) from images (N, 1, 8, 8) and tokens (N, L)."""
        seen = self.picture(images)
        parts = self.line(seen.flatten(2)), self.volume(seen[:, None])
        seen = torch.cat([part.flatten(1) for part in parts], 1)
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]).expand_as(tokens))
        x = x + self.from_picture(torch.tanh(seen))[:, None]
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        x = x + self.gates(self.memory(x)[0])[0]
        rows = x.flatten(0, 1)
        shares = self.router(rows).softmax(-1)
        share, chosen = shares.max(-1)
        x = x + (share[:, None] * torch.tanh(self.experts(rows, chosen))).view_as(x)
        return self.head(x) + self.bias


def batches(count):
    """(images, tokens): scikit-learn's digits, and lines of TEXT with some padding behind."""
    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16 - 0.3
    codes = [max(ord(character) - 59, PADDING) for character in TEXT.replace("\n", " ")]
    text = torch.tensor(codes)
    for step in range(count):
        starts = [(37 * (BATCH * step + n)) % (len(text) - LENGTH - 1) for n in range(BATCH)]
        tokens = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        tokens[: BATCH // 4, LENGTH - 3 :] = PADDING
        yield pixels[BATCH * step : BATCH * (step + 1)], tokens


def loss_of(scores, tokens):
    """The mean cross entropy of the next characters, padding left out."""
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PADDING)
