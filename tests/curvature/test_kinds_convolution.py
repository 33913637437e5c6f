"""Factors of convolutions, transposed and weight-standardised ones, against explicit loops and exact Fishers."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from timm.layers.conv2d_same import Conv2dSame
from torch import nn
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d

from comparing import assert_matches_reference
from reference import Layer, gradients, rows_of
from torch_thor import THOR

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
ALL = {"stride": (1, 3), "padding": (0, 2), "dilation": (3, 1), "groups": 2}

# class; channels and kernel; options; the size of the input. `test_any_convolution` has the combinations without "same"
CASES = {
    "1d_all": (nn.Conv1d, (4, 6, 3), {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}, (9,)),
    "1d_same_circular": (nn.Conv1d, (2, 3, 4), {"padding": "same", "padding_mode": "circular"}, (6,)),
    "1d_depthwise": (nn.Conv1d, (4, 4, 3), {"groups": 4, "padding": 1}, (5,)),
    "3d": (nn.Conv3d, (2, 3, (2, 1, 3)), {}, (3, 2, 4)),
    "3d_same": (nn.Conv3d, (1, 2, (2, 3, 1)), {"padding": "same", "bias": False}, (2, 3, 2)),
    "transposed_1d_gaps": (nn.ConvTranspose1d, (2, 3, 2), {"stride": 4}, (3,)),
    "transposed_2d_doubling": (nn.ConvTranspose2d, (4, 2, 4), {"stride": 2, "padding": 1}, (3, 2)),
    "transposed_2d_uneven": (nn.ConvTranspose2d, (4, 4, (2, 3)), ALL, (3, 2)),
    "transposed_2d_depthwise": (nn.ConvTranspose2d, (3, 6, 2), {"groups": 3, "stride": 2}, (2, 3)),
    "transposed_2d_cropped": (nn.ConvTranspose2d, (2, 2, 2), {"padding": 2}, (6, 5)),
    "transposed_3d": (nn.ConvTranspose3d, (2, 2, 2), {"groups": 2, "stride": 2, "output_padding": 1}, (1, 2, 2)),
    "std": (StdConv2d, (3, 4, 3), {}, (5, 4)),
    "std_bias_groups": (StdConv2d, (4, 6, 3), {"bias": True, "groups": 2, "stride": 2, "eps": 0.1}, (5, 6)),
    "std_same": (StdConv2dSame, (2, 4, 3), {"stride": 2}, (5, 6)),
    "std_same_static": (StdConv2dSame, (2, 4, 3), {}, (4, 3)),
    "scaled": (ScaledStdConv2d, (3, 4, 3), {"gamma": 1.7, "eps": 0.01}, (4, 4)),
    "scaled_all": (ScaledStdConv2d, (4, 4, 3), {"gamma": 1.7, "groups": 2, "dilation": 2, "bias": False}, (7, 6)),
    "scaled_same": (ScaledStdConv2dSame, (2, 3, 4), {"stride": 3}, (7, 5)),
    "bit": (WeightStandardizedConv2d, (2, 4, 3), {"stride": 2, "eps": 1e-8}, (6, 5)),
    "same": (Conv2dSame, (2, 4, 3), {"stride": 2}, (5, 6)),
    "same_even_dilated": (Conv2dSame, (2, 4, (4, 2)), {"dilation": (1, 3), "groups": 2}, (5, 7)),
    "same_larger_stride": (Conv2dSame, (2, 4, 1), {"stride": 3}, (5, 7)),
}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def case(name, batch=3):
    kind, channels, options, size = CASES[name]
    layer = kind(*channels, **options).double()
    if hasattr(layer, "gain"):
        nn.init.normal_(layer.gain)
    return nn.Sequential(layer), torch.randn(batch, channels[0], *size).double()


def check(model, x, terms, split_dim=None, **options):
    def loss(output):
        return (output**3).sum() / terms

    return assert_matches_reference(model, x, loss, terms=terms, split_dim=split_dim, **options)


@pytest.mark.parametrize("name", CASES)
def test_factors(name):
    """With rows as the loops say; a single image is one term."""
    for split_dim in (None, 1, 5):
        check(*case(name), terms=3, split_dim=split_dim)
    model, x = case(name)
    check(model, x[0], terms=1)


@pytest.mark.parametrize("name", [name for name, (kind, *_) in CASES.items() if kind.__module__.startswith("torch.")])
def test_the_oracles_rows_give_back_the_weight_gradient(name):
    """∇W = Σ g aᵀ, a matrix a group: the loops and the matrix's order are right."""
    model, x = case(name)
    grads, uses = gradients(model, x, lambda output: (output**3).sum())
    layer = Layer(model[0], "0.weight")
    [(a, grad_y)] = uses["0"]
    matrices = [g.T @ rows for rows, g in rows_of(model[0], a, grad_y)]
    np.testing.assert_allclose(layer.tensor(matrices, model[0].weight.shape), grads["0.weight"], rtol=1e-10, atol=1e-10)
    for there, back in zip(layer.matrices(grads["0.weight"]), matrices, strict=True):
        np.testing.assert_allclose(there, back, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sizes", [(10, 7), (11, 8), (12, 7), (10, 9)])
def test_output_size_given_to_the_call(sizes):
    """One stride makes several sizes possible; which one it was stands in the output alone."""

    class WithSize(nn.Module):
        def __init__(self, *, by_name):
            super().__init__()
            self.conv, self.by_name = nn.ConvTranspose2d(2, 3, (3, 1), stride=3, padding=(1, 0)), by_name

        def forward(self, x):
            return self.conv(input=x, output_size=list(sizes)) if self.by_name else self.conv(x, list(sizes))

    def forward(model, x):
        y = model(x)
        return y, [("conv", x, y)]

    for by_name in (True, False):
        x = torch.randn(2, 2, 4, 3).double()
        check(WithSize(by_name=by_name).double(), x, terms=2, split_dim=4, forward=forward)


@pytest.mark.parametrize("name", ["transposed_2d_doubling", "transposed_2d_uneven"])
def test_transposed_convolution_of_a_view(name):
    model, x = case(name)
    for view in (
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(2, 3),
        x[:1].expand(3, -1, -1, -1),
        torch.randn(3, 8, 6, 6).double()[:, : 2 * x.shape[1] : 2, ::2, ::2],
    ):
        check(model, view, terms=3)


def test_many_pieces_are_one_batch(monkeypatch):
    """Rows go through memory a few images at a time; a budget of a few numbers must change nothing."""
    monkeypatch.setattr("torch_thor.curvature.kinds.convolution._PIECE_BYTES", {"cpu": 64})
    for name in ("1d_all", "transposed_2d_uneven"):
        check(*case(name, batch=5), terms=5, split_dim=4)


@st.composite
def convolutions(draw):
    """(a convolution of any kind, its input)."""
    n = draw(st.integers(1, 3))
    small = st.tuples(*[st.integers(1, 2 if n == 3 else 3)] * n)
    options = {"kernel_size": draw(small), "stride": draw(small), "dilation": draw(small), "bias": draw(st.booleans())}
    options["padding"] = draw(st.tuples(*[st.integers(0, 2)] * n))
    options["groups"] = draw(st.sampled_from([1, 1, 2]))
    channels = [options["groups"] * draw(st.integers(1, 2)) for _ in range(2)]
    kinds = CONVOLUTIONS
    if draw(st.booleans()):
        kinds = TRANSPOSED
        limits = [max(s, d) for s, d in zip(options["stride"], options["dilation"], strict=True)]
        options["output_padding"] = tuple(draw(st.integers(0, limit - 1)) for limit in limits)
    size = draw(st.tuples(*[st.integers(1, 3 if n == 3 else 5)] * n))
    batch = draw(st.integers(1, 2))
    return nn.Sequential(kinds[n](*channels, **options)).double(), torch.randn(batch, channels[0], *size).double()


@given(data=convolutions(), split_dim=st.one_of(st.none(), st.integers(1, 9)))
def test_any_convolution(data, split_dim):
    model, x = data
    try:
        some = bool(model(x).any())  # not if there is no output, or it is that of the padding alone
    except RuntimeError:  # the kernel does not fit, or nothing of the output is left
        some = False
    assume(some)
    check(model, x, terms=len(x), split_dim=split_dim)


@pytest.mark.parametrize("kind", [StdConv2d, ScaledStdConv2d])
def test_fisher_is_exact_but_for_the_lengths_of_the_rows(kind):
    """Data are all pairs (aᵢ, gⱼ), as for a plain layer; Fisher and gradients of W are autograd's, one at a time."""
    inputs, grads = torch.randn(6, 5).double(), torch.randn(4, 3).double()
    layer = kind(5, 3, 1, bias=False, eps=1e-20).double()
    if kind is ScaledStdConv2d:
        nn.init.normal_(layer.gain)
    x = inputs.repeat_interleave(4, 0)[:, :, None, None]
    losses = (layer(x)[:, :, 0, 0] * grads.repeat(6, 1)).sum(1)
    rows = torch.stack([torch.autograd.grad(one, layer.weight, retain_graph=True)[0].flatten() for one in losses])
    optimizer = THOR(nn.Sequential(layer), lr=0.0, split_dim=None)
    (layer(x)[:, :, 0, 0] * grads.repeat(6, 1)).sum().div(24).backward()
    optimizer.step()
    A, G = optimizer.curvature["0"].factors()
    centred = layer.weight.detach().flatten(1)
    units = nn.functional.normalize(centred - centred.mean(1, keepdim=True))
    away = torch.block_diag(*(torch.eye(5).double() - torch.outer(u, u) for u in units))
    torch.testing.assert_close(away @ torch.kron(G, A) @ away, rows.T @ rows / 24, rtol=1e-10, atol=1e-12)


class Louder(ScaledStdConv2d):
    """Another forward again."""

    def forward(self, x):
        return 2 * super().forward(x)


class StdConv2dOfMine(nn.Conv2d):
    """A stranger."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def test_coverage():
    """The sizes, and no guess where the forward is not known."""
    layers = nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose1d(6, 8, 5, groups=2), StdConv2d(4, 6, 3, groups=2)
    model = nn.Sequential(*layers, ScaledStdConv2d(6, 4, 1), Conv2dSame(4, 2, 3, stride=2))
    found = {e.name: (e.kind, e.factor_sizes, e.groups) for e in THOR(model).coverage()}
    assert found == {
        "0.weight": ("Conv1d", (6, 3), 2),
        "0.bias": ("Conv1d", (3,), 2),
        "1.weight": ("ConvTranspose1d", (15, 4), 2),
        "1.bias": ("ConvTranspose1d", (4,), 2),
        "2.weight": ("StdConv2d", (18, 3), 2),
        "3.weight": ("ScaledStdConv2d", (6, 4), 1),
        "3.bias": ("ScaledStdConv2d", None, 1),
        "3.gain": ("ScaledStdConv2d", None, 1),
        "4.weight": ("Conv2d", (36, 2), 1),
        "4.bias": ("Conv2d", (2,), 1),
    }
    for kind in (Louder, StdConv2dOfMine):
        entries = {e.name: e for e in THOR(nn.Sequential(nn.Conv2d(9, 9, 3), kind(2, 3, 1))).coverage()}
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
    torch.testing.assert_close(list(found[0]), list(found[1]), rtol=1e-5, atol=1e-7)
