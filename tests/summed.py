"""A regression on standardised targets, whose loss is summed or averaged, for the tests of summed losses."""

import torch
from torch import nn
from torch.nn import functional as F


class Regression(nn.Module):
    """6 → 16 → 12 → 40, a norm in between."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 12)
        self.last = nn.Linear(12, 40)

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))


def regression(seed=0):
    torch.manual_seed(seed)
    return Regression().double()


def stream(count, size=64):
    """`count` batches of a fixed stream; `size` may be a list with the size of each."""
    generator = torch.Generator().manual_seed(11)
    sizes = [size] * count if isinstance(size, int) else size
    for n in sizes:
        shape = {"generator": generator, "dtype": torch.float64}
        yield torch.randn(n, 6, **shape), torch.randn(n, 40, **shape)


def summed(output, y, terms=1):
    """The squared error, summed over outputs and batch; divided by the batch size where that is given."""
    return F.mse_loss(output, y, reduction="sum") / terms
