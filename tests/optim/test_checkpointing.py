"""Activation checkpointing, micro-batches and large batches: the same statistics."""

import copy
import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiny import mlp
from torch_thor import THOR, ThorMuon


class Recomputed(nn.Module):
    """The backward pass computes its inside again; one layer is called inside and outside."""

    def __init__(self):
        super().__init__()
        self.reentrant = None
        self.first = nn.Linear(5, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 3)

    def inner(self, h):
        h = h + torch.tanh(self.conv(h.mT)).mT
        return h + self.attention(h, h, h, need_weights=False)[0]

    def forward(self, x):
        h = self.first(x)
        if self.reentrant is None:
            h = self.inner(h)
        else:
            h = checkpoint(self.inner, h, use_reentrant=self.reentrant)
        return self.last(h + self.conv(h.mT).mT)


@pytest.mark.parametrize(
    "make", [partial(THOR, trace_thresholds=(0.0, 0.0)), partial(ThorMuon, factor_decay=0.0)]
)
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_statistics_are_those_of_the_plain_pass_that_trains(make, reentrant):
    """In micro-batches too, and where a loss is given up after the next pass (Lightning)."""
    for sizes, given_up in product(((6,), (1, 3, 2)), (False, True)):
        model = Recomputed().double()
        twin = copy.deepcopy(model)
        model.reentrant = reentrant
        optimizer, other = (make(each, update_interval=1, lr=0.01) for each in (model, twin))
        for _ in range(3):
            for i, part in enumerate(torch.randn(6, 4, 5).double().split(sizes)):
                if given_up and i == 0:
                    model(part * math.nan).square().sum().backward()
                loss = model(part).square().sum()
                if given_up and i == 0:
                    optimizer.zero_grad()
                loss.backward()
                twin(part).square().sum().backward()
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            torch.testing.assert_close(
                [*model.parameters()], [*twin.parameters()], rtol=1e-6, atol=1e-8
            )
        for name, layer in other.curvature.items():
            assert optimizer.curvature[name].refreshes == layer.refreshes == 3
            assert optimizer.curvature[name].rows_per_term == layer.rows_per_term
            torch.testing.assert_close(
                optimizer.curvature[name].factors(), layer.factors(), rtol=1e-7, atol=1e-9
            )


@pytest.mark.parametrize(("make", "least", "most"), [(THOR, 0.0, 1e-12), (ThorMuon, 1e-6, 0.1)])
def test_a_share_of_the_rows_stands_for_all_of_a_large_batch_in_thor_muon(make, least, most):
    """THOR takes all rows; ThorMuon, whose A needs no gradient, takes a share of each pass."""
    model, x = mlp(), torch.randn(3700, 5).double() * torch.arange(1, 6)
    optimizer = make(model, split_dim=None)
    for part in x.split((3000, 700)):
        (model(part).square().mean() * len(part) / len(x)).backward()
    optimizer.step()
    exact = x.mT @ x / len(x)
    found = optimizer.curvature["0"].factors()[0]
    assert least <= (found - exact).norm() / exact.norm() <= most
