"""The optimizers take the steps of `torch_thor.reference`, which a student reads top to bottom."""

import copy
import inspect
import itertools

import pytest
import torch
from torch import nn

from torch_thor import THOR, ThorMuon, reference

SHARED = {
    "damping": 0.05, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0, "update_interval": 2,
    "split_dim": None, "factor_decay": 0.0, "max_update_ratio": None,
}  # fmt: skip
OF_THOR = {**SHARED, "lr": 0.05, "trace_thresholds": (0.01, 0.0), "kl_clip": None}
OF_THOR_MUON = {**SHARED, "lr": 0.02, "nesterov": True, "factor_decay": 0.5}
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "split with a tail": {"split_dim": 4},
    "running average": {"factor_decay": 0.7},
    "without momentum": {"momentum": 0.0},
    "bound": {"max_update_ratio": 0.001},
    "all": {"weight_decay": 0.1, "split_dim": 3, "factor_decay": 0.3, "max_update_ratio": 0.05},
}
ONLY_THOR = {
    "Nesterov": {"nesterov": True},
    "trace rule": {"trace_thresholds": (0.4, 0.1), "update_interval": 1},
    "clip": {"kl_clip": 1e-4},
}
ONLY_THOR_MUON = {"without Nesterov": {"nesterov": False}}


def network(depth, bias):
    """Well-conditioned: of a tiny singular value, the direction is a matter of rounding."""
    torch.manual_seed(0)
    widths = [5, *[6] * (depth - 1), 3 if depth < 5 else 6]
    layers = [
        nn.Linear(*sizes, bias=bias, dtype=torch.float64) for sizes in itertools.pairwise(widths)
    ]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def batches(shape, count=9):
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        x = torch.randn(*shape, 5, dtype=torch.float64, generator=generator) * (1 + 0.1 * i)
        yield x, torch.randn(*shape, 6, dtype=torch.float64, generator=generator)


def loss_of(model, x, y):
    """The mean over the samples of the leading dimension."""
    output = model(x)
    return (output - y[..., : output.shape[-1]]).square().sum() / len(x)


def compared(make, make_reference, options, *, shape=(8,), depth=3, bias=True, rtol=1e-9):
    """Train with both; they end with the same weights. Returns the decisions and the model."""
    model = network(depth, bias)
    twin = copy.deepcopy(model)
    optimizer, slow = make(model, **options), make_reference(twin, **options)
    decisions = set()
    for x, y in batches(shape):
        for one, its in ((model, optimizer), (twin, slow)):
            one.zero_grad()
            loss_of(one, x, y).backward()
            its.step()
        decisions |= {event.decision.name for event in optimizer.last_refresh}
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=rtol, atol=rtol / 100, msg=name)
    return decisions, model


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("shape", [(8,), (4, 3)], ids=["T = 1", "T = 3"])
@pytest.mark.parametrize("name", [*OPTIONS, *ONLY_THOR])
def test_thor_takes_the_steps_of_the_reference(name, shape, bias):
    options = {**OF_THOR, **(OPTIONS | ONLY_THOR)[name]}
    decisions, _ = compared(THOR, reference.ReferenceTHOR, options, shape=shape, bias=bias)
    if name == "trace rule":
        assert decisions == {"UPDATE", "KEEP", "STOP"}


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("shape", [(8,), (4, 3)], ids=["rows", "sequences"])
@pytest.mark.parametrize("name", [*OPTIONS, *ONLY_THOR_MUON])
def test_thor_muon_takes_the_steps_of_the_reference(name, shape, bias):
    options = {**OF_THOR_MUON, **(OPTIONS | ONLY_THOR_MUON)[name]}
    # eigenvalues of Gram matrices have half the digits of singular values
    compared(ThorMuon, reference.ReferenceThorMuon, options, shape=shape, bias=bias, rtol=1e-6)


def test_more_than_ten_matrices_take_shorter_steps():
    options = {**OF_THOR_MUON, "lr": 0.005}
    compared(ThorMuon, reference.ReferenceThorMuon, options, depth=12, rtol=1e-6)


@pytest.mark.parametrize("option", [{"max_update_ratio": 0.001}, {"kl_clip": 1e-4}])
def test_the_bounds_above_are_met(option):
    """Otherwise the comparisons under them would say nothing of them."""
    _, bounded = compared(THOR, reference.ReferenceTHOR, {**OF_THOR, **option})
    _, free = compared(THOR, reference.ReferenceTHOR, OF_THOR)
    assert not torch.allclose(bounded[0].weight, free[0].weight, rtol=1e-3)


def test_it_is_short():
    assert len(inspect.getsource(reference).splitlines()) <= 160
