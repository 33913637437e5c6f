"""Micro-batches and recomputed activations train as a plain pass of the whole batch does."""

import copy
import math
from functools import partial
from itertools import product

import pytest
import torch
from test_sampled_fisher import fixed
from torch import nn
from torch.utils.checkpoint import checkpoint

from comparing import having
from every_kind import build, stream
from tiny import cross_entropy, weights
from torch_thor import THOR, ThorMuon

STREAM = stream()
OPTIONS = {"lr": 0.02, "damping": 0.1, "split_dim": 3, "update_interval": 2}


def trained(cuts, make, *, least_likely, **options):
    """After micro-batches that end at these samples; all forward passes come first."""
    model = build().double()
    optimizer = having(make(model, **OPTIONS, **options), loss_terms=STREAM[0][1].numel())
    for x, labels in STREAM:
        losses = []
        for start, stop in zip((0, *cuts), (*cuts, len(x)), strict=True):
            output, wanted = model(x[start:stop]), labels[start:stop]
            if least_likely:
                wanted = fixed(output).sample()
            if options.get("fisher") == "sampled":
                optimizer.sample_fisher(output, fixed)
            losses.append(cross_entropy(wanted)(output) * (stop - start) / len(x))
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:.*hor.*:RuntimeWarning")
@pytest.mark.parametrize("method", ["empirical", "sampled", "muon"])
def test_micro_batches_equal_one_batch(method):
    """Sampled labels that are the training's equal the training's too: rows count once."""
    muon, least_likely = method == "muon", method == "sampled"
    make, options = (ThorMuon, {}) if muon else (THOR, {"trace_thresholds": (0.0, 0.0)})
    fisher = {"fisher": "sampled"} if least_likely else {}
    model, optimizer = trained((1, 2), make, least_likely=least_likely, **options, **fisher)
    twin, other = trained((), make, least_likely=least_likely, **options)
    # the orthogonalisation turns a direction that is lost in rounding (of a softmax's gradient)
    # into 1e-9
    rtol, atol = (1e-7, 1e-8) if muon else (1e-9, 1e-12)
    torch.testing.assert_close(weights(model), weights(twin), rtol=rtol, atol=atol)
    found, expected = (
        [(layer.refreshes, layer.rows_per_term) for layer in each.curvature.values()]
        for each in (optimizer, other)
    )
    torch.testing.assert_close(found, expected)
    assert muon or {refreshes for refreshes, _ in found} == {3}


class Recomputed(nn.Module):
    """The backward pass computes its inside again; a layer is called inside and outside."""

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
