"""Weight-standardised convolutions and those that pad as TensorFlow does, against explicit loops and exact Fishers."""

import pytest
import torch
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from timm.layers.conv2d_same import Conv2dSame
from torch import nn
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d

from comparing import assert_matches_reference
from torch_thor import THOR

# class, channels and kernel, options, size of the input
CASES = {
    "std": (StdConv2d, (3, 4, 3), {}, (5, 4)),
    "std_bias_groups": (StdConv2d, (4, 6, 3), {"bias": True, "groups": 2, "stride": 2, "eps": 0.1}, (5, 6)),
    "std_same": (StdConv2dSame, (2, 4, 3), {"stride": 2}, (5, 6)),
    "std_same_static": (StdConv2dSame, (2, 4, 3), {}, (4, 3)),
    "scaled": (ScaledStdConv2d, (3, 4, 3), {"gamma": 1.7, "eps": 0.01}, (4, 4)),
    "scaled_all": (
        ScaledStdConv2d,
        (4, 4, 3),
        {"gamma": 1.7, "groups": 2, "stride": 2, "dilation": 2, "bias": False},
        (7, 6),
    ),
    "scaled_same": (ScaledStdConv2dSame, (2, 3, 4), {"stride": 3}, (7, 5)),
    "bit": (WeightStandardizedConv2d, (2, 4, 3), {"stride": 2, "eps": 1e-8}, (6, 5)),
    "same": (Conv2dSame, (2, 4, 3), {"stride": 2}, (5, 6)),
    "same_even_dilated": (Conv2dSame, (2, 4, (4, 2)), {"dilation": (1, 3), "groups": 2}, (5, 7)),
    "same_larger_stride": (Conv2dSame, (2, 4, 1), {"stride": 3}, (5, 7)),
}


def case(name):
    kind, channels, options, size = CASES[name]
    layer = kind(*channels, **options).double()
    if hasattr(layer, "gain"):
        nn.init.normal_(layer.gain)
    return nn.Sequential(layer), torch.randn(3, channels[0], *size).double()


@pytest.mark.parametrize("split_dim", [None, 1, 5])
@pytest.mark.parametrize("name", CASES)
def test_factors(name, split_dim):
    model, x = case(name)
    assert_matches_reference(model, x, lambda y: (y**3).sum() / 3, terms=3, split_dim=split_dim)


def test_single_image():
    model, x = case("scaled")
    assert_matches_reference(model, x[0], lambda y: (y**3).sum(), terms=1, split_dim=None)


@pytest.mark.parametrize("kind", [StdConv2d, ScaledStdConv2d])
def test_fisher_is_exact_but_for_the_lengths_of_the_rows(kind):
    """Data are all pairs (aᵢ, gⱼ), as for a plain layer; Fisher and gradients of W are autograd's, one at a time."""
    inputs, grads = torch.randn(6, 5).double(), torch.randn(4, 3).double()
    layer = kind(5, 3, 1, bias=False, eps=1e-20).double()
    if kind is ScaledStdConv2d:
        nn.init.normal_(layer.gain)
    x = inputs.repeat_interleave(4, 0)[:, :, None, None]
    rows = []
    for i in range(24):
        loss = (layer(x[i : i + 1])[0, :, 0, 0] * grads[i % 4]).sum()
        rows.append(torch.autograd.grad(loss, [layer.weight])[0].flatten())
    fisher = torch.stack(rows).T @ torch.stack(rows) / 24
    optimizer = THOR(nn.Sequential(layer), lr=0.0, split_dim=None)
    (layer(x)[:, :, 0, 0] * grads.repeat(6, 1)).sum().div(24).backward()
    optimizer.step()
    A, G = optimizer.curvature["0"].factors()
    centred = layer.weight.detach().flatten(1)
    units = nn.functional.normalize(centred - centred.mean(1, keepdim=True))
    away = torch.block_diag(*(torch.eye(5).double() - torch.outer(u, u) for u in units))
    torch.testing.assert_close(away @ torch.kron(G, A) @ away, fisher, rtol=1e-10, atol=1e-12)


class Louder(ScaledStdConv2d):
    """Another forward again."""

    def forward(self, x):
        return 2 * super().forward(x)


class StdConv2dOfMine(nn.Conv2d):
    """A stranger."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def test_coverage():
    model = nn.Sequential(StdConv2d(4, 6, 3, groups=2), ScaledStdConv2d(6, 4, 1), Conv2dSame(4, 2, 3, stride=2))
    found = {e.name: (e.kind, e.factor_sizes, e.groups, e.preconditioned) for e in THOR(model).coverage()}
    assert found == {
        "0.weight": ("StdConv2d", (18, 3), 2, True),
        "1.weight": ("ScaledStdConv2d", (6, 4), 1, True),
        "1.bias": ("ScaledStdConv2d", None, 1, False),
        "1.gain": ("ScaledStdConv2d", None, 1, False),
        "2.weight": ("Conv2d", (36, 2), 1, True),
        "2.bias": ("Conv2d", (2,), 1, True),
    }


@pytest.mark.parametrize("kind", [Louder, StdConv2dOfMine])
def test_a_forward_that_is_not_known_is_not_guessed(kind):
    model = nn.Sequential(nn.Conv2d(2, 2, 1), kind(2, 3, 1))
    entries = {e.name: e for e in THOR(model).coverage()}
    assert entries["1.weight"].reason == f"{kind.__name__} overrides the forward of Conv2d"


def test_half_precision_statistics_are_those_of_float32():
    """c of a bfloat16 weight is found in float32, where the factors are."""
    model, x = case("scaled_all")
    model.bfloat16()
    twin, _ = case("scaled_all")
    twin.float().load_state_dict(model.state_dict())
    found = []
    for one, inputs in ((model, x.bfloat16()), (twin, x.bfloat16().float())):
        optimizer = THOR(one, lr=0.0, trace_thresholds=(0.0, 0.0))
        (one(inputs).float() * 3).sum().div(3).backward()  # the gradient is a constant: no rounding of forward in it
        optimizer.step()
        found.append(optimizer.curvature["0"].factors()[1])
    for half, single in zip(*found, strict=True):
        torch.testing.assert_close(half, single, rtol=1e-5, atol=1e-7)
