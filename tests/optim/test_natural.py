"""The bound on a step relative to the parameter: its length and direction, whatever a parameter is
like.
"""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tiny import batches, cross_entropy, mlp, train, weights
from torch_thor import THOR


class Odd(nn.Module):
    """A layer of each way to the update (blocks, diagonal, plain), and parameters of every shape
    and kind.
    """

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.image = nn.Conv2d(4, 6, (2, 1), groups=2)
        self.norm = nn.LayerNorm(6)
        self.closed = nn.Linear(6, 6)  # as a residual branch that starts closed
        self.head = nn.Linear(6, 3)
        self.position = nn.Parameter(torch.zeros(1, 3, 6))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.turn = nn.Parameter(torch.ones(2, 3, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        nn.init.zeros_(self.closed.weight)

    def forward(self, words):
        x = self.words(words).mT[..., None]  # (N, 4, L, 1)
        x = self.image(x).squeeze(-1).mT  # (N, L - 1, 6)
        x = self.norm(x) * self.gain + self.position
        x = x + self.closed(x)
        return self.head(x.mean(1)) * (self.turn * 2j).abs().sum(0) + self.nothing.sum(0)


ROWS = {  # of what is not zeros or a matrix with more rows than 1, by hand
    "words.weight": 11, "image.weight": 6, "image.bias": 6, "norm.weight": 6, "norm.bias": 6,
    "closed.weight": 6,
    "closed.bias": 6, "head.weight": 3, "head.bias": 3, "position": 3, "gain": 1, "turn": 2,
    "nothing": 0,
}  # fmt: skip


def odd(scale=1.0):
    torch.manual_seed(5)
    model = Odd().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def stream():
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(11, (8, 4), generator=generator),
            torch.randint(3, (8,), generator=generator),
        )
    ]


def moved(model, **options):
    """By how much the first step moves each parameter."""
    model = copy.deepcopy(model)
    before = weights(model)
    options = {"lr": 0.05, **options}
    train(model, THOR(model, **options), stream())
    return {name: value - before[name] for name, value in weights(model).items()}


def longest(model, ratio):
    """By hand, parameter by parameter."""
    return {
        name: ratio
        * max(math.sqrt(float(p.detach().abs().square().sum())), 0.03 * math.sqrt(ROWS[name]))
        for name, p in model.named_parameters()
    }


@given(
    lr=st.floats(-6, 2).map(lambda e: 10.0**e),
    ratio=st.floats(-5, 1).map(lambda e: 10.0**e),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 10.0]),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_length_and_direction_of_any_step(lr, ratio, scale, momentum, nesterov, decay):
    model = odd(scale)
    options = {
        "lr": lr,
        "momentum": momentum,
        "nesterov": nesterov and momentum > 0,
        "weight_decay": decay,
    }
    free = moved(model, max_update_ratio=None, **options)
    bounded = moved(model, max_update_ratio=ratio, **options)
    for name, most in longest(model, ratio).items():
        factor = 1 + momentum if options["nesterov"] else 1  # the first Nesterov step is d + μ d
        size = (
            float(model.get_parameter(name).detach().abs().max())
            if model.get_parameter(name).numel()
            else 0.0
        )
        wanted = float(free[name].norm()) / factor
        rounding = 1e-14 * (size * math.sqrt(free[name].numel()) + most)  # of W − lr v
        length = float(bounded[name].norm()) / factor
        assert length <= most * (1 + 1e-9) + rounding, name
        if wanted <= most * (1 - 1e-9) - rounding:
            assert torch.equal(bounded[name], free[name]), name
        elif wanted >= most * (1 + 1e-9) + rounding:
            assert length == pytest.approx(most, rel=1e-9, abs=rounding), name
            shrunk = free[name] * (most / wanted)
            assert (bounded[name] - shrunk).norm() <= 1e-9 * most * factor + 3 * rounding * (
                1 + lr
            ), name


def test_half_precision_weights_are_measured_in_float32():
    """Their own norm has 3 digits, and overflows in float16 from 65,504 on."""
    for dtype, nesterov in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        model = nn.Sequential(nn.Linear(100, 128, bias=False)).to(dtype)
        nn.init.constant_(model[0].weight, 600.0)
        optimizer = THOR(model, lr=1.0, nesterov=nesterov, max_update_ratio=1e-6)
        (model(torch.randn(4, 100).to(dtype)).float() * torch.randn(4, 128)).sum().backward()
        optimizer.step()
        direction = optimizer.state[model[0].weight]["momentum_buffer"]
        assert direction.dtype == torch.float32
        assert float(direction.norm()) == pytest.approx(
            1e-6 * 600 * math.sqrt(100 * 128), rel=1e-5
        ), (dtype, nesterov)


def test_precisions_side_by_side():
    """Directions are measured together by device and precision, and each parameter meets its own
    limit.
    """
    [(x, labels)] = batches(1)
    for momentum in (0.0, 0.9):
        model = mlp(dtype=torch.float32)
        model[2].double()
        model[4].bfloat16()
        before = weights(model)
        optimizer = THOR(model, lr=100.0, momentum=momentum, max_update_ratio=0.2)
        h = model[2](torch.tanh(model[0](x.float())).double())
        cross_entropy(labels)(model[4](torch.tanh(h).bfloat16()).float()).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            old = before[name].double()
            most = 0.2 * max(float(old.norm()), 0.03 * math.sqrt(len(old)))
            rel = 2e-2 if parameter.dtype == torch.bfloat16 else 1e-5
            assert float((parameter.detach().double() - old).norm()) == pytest.approx(
                most, rel=rel
            ), (name, momentum)


def test_accelerators_are_not_waited_for(monkeypatch):
    """A meta tensor has no numbers: asking it for one is an error. Only the gradients are asked,
    once.
    """
    monkeypatch.setattr(
        "torch_thor.optim.preconditioner.largest_gradient", lambda groups, plan: 1.0
    )
    for options in (
        {},
        {"kl_clip": 1e-3},
        {"momentum": 0.0},
        {"nesterov": True, "weight_decay": 0.1},
    ):
        model = nn.Sequential(
            nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, dtype=torch.float32)
        ).to("meta")
        optimizer = THOR(model, **options)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        model[0].weight.grad = model[2].weight.grad = None  # no forward pass, so no statistics
        optimizer.step()
