"""The bound on the length of a step relative to the length of its parameter."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tiny import train, weights
from torch_thor import THOR


class Odd(nn.Module):
    """Layers of several kinds, and parameters of several shapes."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.image = nn.Conv2d(4, 6, (2, 1), groups=2)
        self.norm = nn.LayerNorm(6)
        self.closed = nn.Linear(6, 6)  # a residual branch with zeros
        self.head = nn.Linear(6, 3)
        self.position = nn.Parameter(torch.zeros(1, 3, 6))
        self.gain = nn.Parameter(torch.tensor(0.7))
        nn.init.zeros_(self.closed.weight)

    def forward(self, words):
        x = self.words(words).mT[..., None]  # (N, 4, L, 1)
        x = self.image(x).squeeze(-1).mT  # (N, L - 1, 6)
        x = self.norm(x) * self.gain + self.position
        x = x + self.closed(x)
        return self.head(x.mean(1))


ROWS = {"position": 3, "gain": 1}  # other parameters have as many rows as dimension 0


def moved(model, **options):
    """Return by how much the first step moves each parameter."""
    model = copy.deepcopy(model)
    before, generator = weights(model), torch.Generator().manual_seed(3)
    words = torch.randint(11, (8, 4), generator=generator)
    labels = torch.randint(3, (8,), generator=generator)
    train(model, THOR(model, **options), [(words, labels)])
    return {name: value - before[name] for name, value in weights(model).items()}


@given(
    lr=st.floats(-6, 2).map(lambda e: 10.0**e),
    ratio=st.floats(-5, 1).map(lambda e: 10.0**e),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 10.0]),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_a_longer_step_is_shortened_to_the_bound(lr, ratio, scale, decay):
    torch.manual_seed(5)
    model = Odd().double()
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    options = {"lr": lr, "momentum": 0.9, "weight_decay": decay}
    free = moved(model, max_update_ratio=None, **options)
    bounded = moved(model, max_update_ratio=ratio, **options)
    for name, parameter in model.named_parameters():
        rows = ROWS.get(name) or len(parameter)
        most = ratio * max(float(parameter.detach().norm()), 0.03 * math.sqrt(rows))
        largest = float(parameter.detach().abs().max())
        rounding = 1e-14 * (largest * math.sqrt(parameter.numel()) + most)  # of W − lr v
        wanted, length = (float(each[name].norm()) for each in (free, bounded))
        assert length <= most * (1 + 1e-9) + rounding, name
        if wanted <= most * (1 - 1e-9) - rounding:
            assert torch.equal(bounded[name], free[name]), name
        elif wanted >= most * (1 + 1e-9) + rounding:
            assert length == pytest.approx(most, rel=1e-9, abs=rounding), name
            difference = (bounded[name] - free[name] * (most / wanted)).norm()
            assert difference <= 1e-9 * most + 3 * rounding * (1 + lr), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_a_weight_in_half_precision_is_computed_in_float32(dtype):
    """In bfloat16 the norm has 3 digits, and it overflows in float16 from 65,504 on."""
    model = nn.Sequential(nn.Linear(100, 128, bias=False)).to(dtype)
    nn.init.constant_(model[0].weight, 600.0)
    optimizer = THOR(model, lr=1.0, max_update_ratio=1e-6)
    (model(torch.randn(4, 100).to(dtype)).float() * torch.randn(4, 128)).sum().backward()
    optimizer.step()
    direction = optimizer.state[model[0].weight]["momentum_buffer"]
    assert direction.dtype == torch.float32
    most = 1e-6 * 600 * math.sqrt(100 * 128)
    assert float(direction.norm()) == pytest.approx(most, rel=1e-5)
