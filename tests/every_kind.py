"""A small model with layers of all kinds, and token batches for it."""

import torch
from timm.layers import ScaledStdConv2d
from torch import nn
from torch.nn import functional as F
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

STEPS = 6


class Experts(nn.Module):
    """A linear layer a kind of token; kinds are missing in some batches."""

    def __init__(self, count=4, inputs=4, outputs=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, outputs, inputs) / 2)
        self.weight_bias = nn.Parameter(torch.zeros(count, outputs))

    def forward(self, x, tokens):
        y = x.new_zeros(*x.shape[:-1], self.weight.shape[1])
        for e in range(len(self.weight)):
            mine = tokens % len(self.weight) == e
            y[mine] = F.linear(x[mine], self.weight[e], self.weight_bias[e])
        return y


class EveryKind(nn.Module):
    """Two branches: a decoder that is the embedding, and what lies inside modules."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.places = nn.Parameter(torch.randn(5, 4))
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(4, 1, batch_first=True, kdim=2, vdim=2, add_bias_kv=True)
        self.conv = nn.Conv2d(4, 2, (1, 2), groups=2)
        self.transposed = nn.ConvTranspose1d(2, 4, 2, groups=2)
        self.last = nn.RMSNorm(4)
        self.decoder = nn.Linear(4, 9)
        self.decoder.weight = self.words.weight
        self.scaled = BartScaledWordEmbedding(9, 4, None, embed_scale=2.0)
        self.experts = Experts()
        self.rnn = nn.LSTM(6, 3, 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(6, 4)
        self.standardised = ScaledStdConv2d(1, 3, 2)
        self.head = Conv1D(9, 3)

    def forward(self, x):
        h = self.norm(self.words(x) + self.places)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        narrow = torch.tanh(self.conv(h.mT[:, :, None])).squeeze(2)
        h = h + self.cross(h, narrow.mT, narrow.mT)[0] + self.transposed(narrow).mT
        inner = self.rnn(self.experts(self.scaled(x), x))[0]
        state = None
        for t in range(inner.shape[1]):
            state = self.cell(inner[:, t], state)
        inner = self.head(self.standardised(state.view(-1, 1, 2, 2)).flatten(1))
        return self.decoder(self.last(h)) + inner[:, None]


def build():
    torch.manual_seed(1)
    return EveryKind()


def stream():
    """Tokens of kind 3 come late, and tokens of kind 0 go early."""
    generator = torch.Generator().manual_seed(4)
    bounds = [(int(step > 2), 3 + (step > 1)) for step in range(STEPS)]
    kinds = [torch.randint(*bound, (4, 5), generator=generator) for bound in bounds]
    return [(tokens, torch.randint(9, (4, 5), generator=generator)) for tokens in kinds]
