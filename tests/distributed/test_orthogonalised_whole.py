"""With `whole_matrices=True` the step of ThorMuon under FSDP2 is that of one process, whose matrices nobody divides."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from joined import as_one_process, shares, stream, train, world_of
from torch_thor import ThorMuon


class Free(nn.Module):
    """A matrix without a kind, experts whose matrices are numbered, and a convolution; tall and wide, fused weights."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 2)
        self.free = nn.Parameter(torch.randn(9, 7) / 3)
        self.numbered = nn.Parameter(torch.randn(3, 7, 4) / 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.tokens = nn.Embedding(11, 8)
        self.rows = nn.Linear(80, 9)
        self.tall = nn.Linear(4, 13)
        self.head = nn.Linear(13, 5)

    def forward(self, batch):
        pixels, words = batch
        x = self.tokens(words)
        x = self.attention(x, x, x, need_weights=False)[0].mean(1)
        x = self.rows(torch.cat([torch.tanh(self.conv(pixels)).flatten(1)[:, :72], x], dim=1)) @ self.free
        x = torch.einsum("bi,eij->bj", torch.tanh(x), self.numbered)
        return self.head(torch.tanh(self.tall(x)))


def free():
    torch.manual_seed(0)
    return Free().double()


def both(rank, world, **options):
    """Returns how many collectives ordinary steps of the ranks start."""
    sent = []

    def counted(optimizer):
        with CommDebugMode() as counter:
            optimizer.step()
        if optimizer.distributed.whole_matrices and not optimizer.last_refresh:
            sent.append(counter.get_total_counts())

    def go(model, optimizer, first, step):
        return train(model, optimizer, shares(stream(7), first, step), step=counted)

    options = {"method": ThorMuon, "lr": 0.05, "damping": 0.1, "inner": (), **options}
    as_one_process(rank, world, go, free, distributed={"whole_matrices": True}, rtol=1e-4, atol=1e-6, **options)
    return set(sent)


CASES = {
    "blocks, fsdp-1": ((1,), {"split_dim": 4}),
    "blocks, fsdp-4": ((4,), {"split_dim": 4}),  # rows that are not divided evenly, shards without rows
    "decay, hsdp": ((2, 2), {"split_dim": 4, "weight_decay": 0.1, "layers": "-attention.k_proj"}),
    "whole, fsdp-2": ((2,), {"split_dim": None, "nesterov": False}),
}


@pytest.mark.filterwarnings("ignore:.*returns a view")
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(run, name):
    mesh, options = CASES[name]
    world = world_of(mesh)
    for sent in run(world, functools.partial(both, way=mesh, **options)):
        assert sent == {3 + (world > 1)}  # there and back, and the norms of the weights; all agree first
