"""Layers of all kinds, and what else happens to a training: two things at a time."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from test_sampled_fisher import fixed
from torch import nn

from comparing import having
from every_kind import build, stream
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon

STREAM = stream()
MUON = {"lr": 0.02, "damping": 0.1, "split_dim": 3, "update_interval": 2}
OPTIONS = {**MUON, "trace_thresholds": (0.0, 0.0)}

pytestmark = pytest.mark.filterwarnings(
    "ignore:THOR.*:RuntimeWarning", "ignore:Thor.*:RuntimeWarning"
)


class Bypass(nn.Module):
    """Uses the weight of a layer without calling it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x @ self.inner.weight + self.inner.bias


def freeze(model):
    """Experts whose biases are trained, a recurrent weight in the middle, and a convolution."""
    for frozen in (model.experts.weight, model.rnn.weight_hh_l0, model.standardised.weight):
        frozen.requires_grad_(False)


def bypass(model):
    model.head = Bypass(model.head)


# what becomes of the model, and how many of its layers then refresh
CHANGES = {"trained": (lambda model: None, 25), "frozen": (freeze, 22), "uncalled": (bypass, 24)}


def trained(change, cuts, make, *, least_likely, **options):
    """After micro-batches that end at these samples; all forward passes come first."""
    model = build().double()
    CHANGES[change][0](model)
    optimizer = having(make(model, **options), loss_terms=STREAM[0][1].numel())
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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["empirical", "sampled", "muon"])
def test_micro_batches_equal_one_batch(change, method):
    """Sampled labels that are the training's equal the training's too: rows count once."""
    muon, least_likely = method == "muon", method == "sampled"
    make, options = (ThorMuon, MUON) if muon else (THOR, OPTIONS)
    fisher = {"fisher": "sampled"} if least_likely else {}
    model, one = trained(change, (1, 2), make, least_likely=least_likely, **options, **fisher)
    twin, other = trained(change, (), make, least_likely=least_likely, **options)
    # the orthogonalisation turns a direction that is lost in rounding (of a softmax's gradient)
    # into 1e-9
    rtol, atol = (1e-7, 1e-8) if muon else (1e-9, 1e-12)
    torch.testing.assert_close(weights(model), weights(twin), rtol=rtol, atol=atol)
    found, expected = (
        [(c.refreshes, c.rows_per_term) for c in each.curvature.values() if c.refreshes]
        for each in (one, other)
    )
    torch.testing.assert_close(found, expected)
    assert len(found) == CHANGES[change][1] - 2 * muon  # ThorMuon has no diagonal factors
    assert muon or {refreshes for refreshes, _ in found} == {3}


class Adapted(nn.Module):
    """A frozen base and an adapter beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter = mlp().requires_grad_(False), mlp()

    def forward(self, x):
        return self.base(x) + self.adapter(x)


@pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, lambda model: AGCSGD(model, momentum=0.9)])
def test_an_offloaded_base_does_not_disturb_the_training_of_its_adapter(make):
    """Its parameters are on the meta device, but for the time of a forward pass."""
    model = Adapted()
    twin = copy.deepcopy(model)
    cpu_offload(model.base, execution_device="cpu")
    assert all(p.is_meta for p in model.base.parameters())
    for each in (model, twin):
        train(each, make(each), batches(4))
    assert_same(weights(model.adapter), weights(twin.adapter))
