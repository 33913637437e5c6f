"""THOR and ThorMuon take the steps of `torch_thor.reference`, in float64."""

import copy
import itertools

import pytest
import torch
from torch import nn

from torch_thor import THOR, ThorMuon
from torch_thor.reference import ReferenceTHOR, ReferenceThorMuon

STEPS = 9

OF_THOR = {
    "lr": 0.3,
    "damping": 0.05,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.0,
    "update_interval": 2,
    "trace_thresholds": (0.0, 0.0),
    "split_dim": None,
    "factor_decay": 0.0,
    "max_update_ratio": None,
    "kl_clip": None,
}
THOR_CASES = {
    "plain": {},
    "nesterov": {"nesterov": True},
    "weight decay": {"weight_decay": 0.1},
    "split with a tail": {"split_dim": 4},
    "split into numbers": {"split_dim": 1},
    "running average": {"factor_decay": 0.6},
    "trace rule": {"trace_thresholds": (0.1, 0.02), "update_interval": 1},
    "max_update_ratio": {"max_update_ratio": 0.05},
    "kl_clip": {"kl_clip": 0.01},
    "kl_clip in the place of max_update_ratio": {"kl_clip": 0.01, "max_update_ratio": 1e-4},
    "everything": {
        "nesterov": True,
        "weight_decay": 0.1,
        "split_dim": 4,
        "factor_decay": 0.6,
        "trace_thresholds": (0.02, 0.001),
        "max_update_ratio": 0.05,
        "update_interval": 1,
    },
}

OF_MUON = {
    "lr": 0.1,
    "damping": 0.2,
    "momentum": 0.8,
    "nesterov": True,
    "weight_decay": 0.0,
    "update_interval": 2,
    "split_dim": None,
    "factor_decay": 0.0,
    "max_update_ratio": None,
    "anytime": False,
}
MUON_CASES = {
    "plain": {},
    "no momentum": {"momentum": 0.0},
    "not nesterov": {"nesterov": False},
    "weight decay": {"weight_decay": 0.4},
    "split with a tail": {"split_dim": 4},
    "split into numbers": {"split_dim": 1},
    "running average": {"factor_decay": 0.6},
    "every step": {"update_interval": 1},
    "max_update_ratio": {"max_update_ratio": 0.05},
    "anytime": {"anytime": True},
    "everything": {
        "anytime": True,
        "weight_decay": 0.4,
        "split_dim": 4,
        "factor_decay": 0.6,
        "max_update_ratio": 0.1,
        "update_interval": 1,
    },
}


class MeanOfTokens(nn.Module):
    def forward(self, x):
        return x.mean(1)


def perceptron(*widths, bias=True):
    layers = [nn.Linear(*sizes, bias=bias) for sizes in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))[:-1].double()


def of_tokens():
    """The first layers see tokens, and the last layer samples."""
    head = nn.Linear(6, 3).double()
    return nn.Sequential(perceptron(5, 9, 6), nn.Tanh(), MeanOfTokens(), head)


class Sum(nn.Module):
    """Twelve matrices side by side; one after the other they would amplify rounding."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(perceptron(5, 6, 3) for _ in range(6))

    def forward(self, x):
        return sum(part(x) for part in self.parts)


def rows(step):
    """The inputs grow by little, so that some traces change by less than 1 %."""
    return (1 + 0.003 * step) * torch.randn(64, 5, generator=torch.Generator().manual_seed(3))


def tokens(step):
    """(N, L, d_in): L, and so T, differs from step to step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, (4, 3, 6)[step % 3], 5, generator=generator)


NETWORKS = {
    "biases": (lambda: perceptron(5, 9, 6, 3), rows),
    "no biases": (lambda: perceptron(5, 9, 6, 3, bias=False), rows),
    "tokens": (of_tokens, tokens),
    "many layers": (Sum, rows),
}


def backward(model, make_inputs, step):
    x = make_inputs(step).double()
    output = model(x)
    targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(100 + step))
    model.zero_grad()
    (output - targets).square().mean().backward()


def train(network, make, options):
    """The weights after each step, and what the trace rule has decided."""
    build, make_inputs = NETWORKS[network]
    torch.manual_seed(0)
    model = build()
    optimizer = make(model, **options)
    weights, decisions = [], set()
    for step in range(STEPS):
        backward(model, make_inputs, step)
        optimizer.step()
        weights.append(copy.deepcopy(model.state_dict()))
        decisions |= {event.decision.value for event in getattr(optimizer, "last_refresh", ())}
    return weights, decisions


def difference(found, wanted):
    """The largest distance of two parameters, relative to their length."""
    return max(((found[name] - W).norm() / W.norm()).item() for name, W in wanted.items())


def assert_same_steps(network, make, make_reference, options):
    """Return what the trace rule has decided."""
    weights, decisions = train(network, make, options)
    expected, _ = train(network, make_reference, options)
    for step, pair in enumerate(zip(weights, expected, strict=True)):
        assert difference(*pair) < 1e-10, f"after step {step}"
    return decisions


@pytest.mark.parametrize("case", THOR_CASES)
@pytest.mark.parametrize("network", NETWORKS)
def test_thor(network, case):
    decisions = assert_same_steps(network, THOR, ReferenceTHOR, OF_THOR | THOR_CASES[case])
    if case == "trace rule":
        assert decisions == {"update", "keep", "stop"}


@pytest.mark.parametrize("case", MUON_CASES)
@pytest.mark.parametrize("network", NETWORKS)
def test_thor_muon(network, case):
    decisions = assert_same_steps(network, ThorMuon, ReferenceThorMuon, OF_MUON | MUON_CASES[case])
    assert decisions == {"update"}
