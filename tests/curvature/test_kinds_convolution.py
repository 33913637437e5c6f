"""Factors of convolutions in one to three dimensions and of their transposes, against the explicit loops."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from comparing import assert_matches_reference
from reference import Layer, gradients, rows_of
from torch_thor import THOR

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}

# class, channels and options; the size of the input
CASES = {
    "1d": (nn.Conv1d, (4, 6, 3), {}, (7,)),
    "1d_all": (nn.Conv1d, (4, 6, 3), {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}, (9,)),
    "1d_same_circular": (nn.Conv1d, (2, 3, 4), {"padding": "same", "padding_mode": "circular"}, (6,)),
    "1d_depthwise": (nn.Conv1d, (4, 4, 3), {"groups": 4, "padding": 1}, (5,)),
    "3d": (nn.Conv3d, (2, 3, (2, 1, 3)), {}, (3, 2, 4)),
    "3d_all": (nn.Conv3d, (4, 2, 2), {"stride": (1, 2, 1), "padding": (0, 1, 1), "groups": 2}, (3, 4, 2)),
    "3d_same": (nn.Conv3d, (1, 2, (2, 3, 1)), {"padding": "same", "bias": False}, (2, 3, 2)),
    "transposed_1d": (nn.ConvTranspose1d, (3, 4, 3), {}, (5,)),
    "transposed_1d_all": (
        nn.ConvTranspose1d,
        (4, 6, 3),
        {"stride": 3, "padding": 2, "dilation": 2, "output_padding": 1, "groups": 2},
        (4,),
    ),
    "transposed_1d_gaps": (nn.ConvTranspose1d, (2, 3, 2), {"stride": 4}, (3,)),
    "transposed_2d": (nn.ConvTranspose2d, (2, 3, (3, 2)), {"bias": False}, (3, 4)),
    "transposed_2d_doubling": (nn.ConvTranspose2d, (4, 2, 4), {"stride": 2, "padding": 1}, (3, 2)),
    "transposed_2d_output_padding": (
        nn.ConvTranspose2d,
        (2, 2, 3),
        {"stride": 2, "padding": 1, "output_padding": (1, 0)},
        (2, 3),
    ),
    "transposed_2d_uneven": (
        nn.ConvTranspose2d,
        (4, 4, (2, 3)),
        {"stride": (1, 3), "padding": (0, 2), "dilation": (3, 1), "groups": 2},
        (3, 2),
    ),
    "transposed_2d_depthwise": (nn.ConvTranspose2d, (3, 6, 2), {"groups": 3, "stride": 2}, (2, 3)),
    "transposed_2d_cropped": (nn.ConvTranspose2d, (2, 2, 2), {"padding": 2}, (6, 5)),
    "transposed_2d_pointwise": (nn.ConvTranspose2d, (3, 2, 1), {"stride": 2}, (2, 3)),
    "transposed_3d": (nn.ConvTranspose3d, (2, 3, (1, 2, 2)), {"stride": (2, 1, 2), "padding": (0, 1, 0)}, (2, 2, 2)),
    "transposed_3d_groups": (nn.ConvTranspose3d, (2, 2, 2), {"groups": 2, "stride": 2, "output_padding": 1}, (1, 2, 2)),
}


def case(name, batch=3):
    kind, channels, options, size = CASES[name]
    return nn.Sequential(kind(*channels, **options)).double(), torch.randn(batch, channels[0], *size).double()


def loss_of(terms):
    return lambda output: (output**3).sum() / terms


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("split_dim", [None, 1, 5])
@pytest.mark.parametrize("name", CASES)
def test_factors(name, split_dim):
    model, x = case(name)
    assert_matches_reference(model, x, loss_of(3), terms=3, split_dim=split_dim)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", CASES)
def test_the_oracles_rows_give_back_the_weight_gradient(name):
    """∇W = Σ g aᵀ, a matrix a group: the loops and the matrix's order are right."""
    model, x = case(name)
    grads, uses = gradients(model, x, loss_of(1))
    layer = Layer(model[0], "0.weight")
    [(a, grad_y)] = uses["0"]
    matrices = [g.T @ rows for rows, g in rows_of(model[0], a, grad_y)]
    np.testing.assert_allclose(layer.tensor(matrices, model[0].weight.shape), grads["0.weight"], rtol=1e-10, atol=1e-10)
    for there, back in zip(layer.matrices(grads["0.weight"]), matrices, strict=True):
        np.testing.assert_allclose(there, back, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["1d_all", "3d", "transposed_1d_all", "transposed_2d_doubling", "transposed_3d"])
def test_single_image_is_one_term(name):
    model, x = case(name)
    assert_matches_reference(model, x[0], loss_of(1), terms=1, split_dim=None)


class WithSize(nn.Module):
    """Asks the transposed convolution for an output size of its own, by position or by name."""

    def __init__(self, conv, sizes, *, by_name):
        super().__init__()
        self.conv, self.sizes, self.by_name = conv, sizes, by_name

    def forward(self, x):
        return self.conv(input=x, output_size=self.sizes) if self.by_name else self.conv(x, self.sizes)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("sizes", [(10, 7), (11, 8), (12, 7), (10, 9)])
def test_output_size_given_to_the_call(sizes, by_name):
    """One stride makes several sizes possible; which one it was stands in the output alone."""
    conv = nn.ConvTranspose2d(2, 3, (3, 1), stride=3, padding=(1, 0)).double()
    model = WithSize(conv, list(sizes), by_name=by_name)
    x = torch.randn(2, 2, 4, 3).double()

    def forward(model, x):
        y = model(x)
        return y, [("conv", x, y)]

    assert_matches_reference(model, x, loss_of(2), terms=2, split_dim=4, forward=forward)


@pytest.mark.parametrize("name", ["transposed_2d_doubling", "transposed_2d_uneven"])
@pytest.mark.parametrize("view", ["channels_last", "transposed", "expanded", "steps"])
def test_transposed_convolution_of_a_view(name, view):
    model, x = case(name)
    x = {
        "channels_last": lambda: x.contiguous(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(2, 3),
        "expanded": lambda: x[:1].expand(3, -1, -1, -1),
        "steps": lambda: torch.randn(3, 8, 6, 6).double()[:, : 2 * x.shape[1] : 2, ::2, ::2],
    }[view]()
    assert_matches_reference(model, x, loss_of(3), terms=3, split_dim=None)


def test_many_pieces_are_one_batch(monkeypatch):
    """Rows go through memory a few images at a time; a budget of a few numbers must change nothing."""
    monkeypatch.setattr("torch_thor.curvature.kinds.convolution._PIECE_BYTES", {"cpu": 64})
    for name in ("1d_all", "transposed_2d_uneven"):
        model, x = case(name, batch=5)
        assert_matches_reference(model, x, loss_of(5), terms=5, split_dim=4)


@st.composite
def convolutions(draw):
    """(a convolution of any kind, its input)."""
    n = draw(st.integers(1, 3))
    small = st.tuples(*[st.integers(1, 2 if n == 3 else 3)] * n)
    options = {"kernel_size": draw(small), "stride": draw(small), "dilation": draw(small), "bias": draw(st.booleans())}
    options["padding"] = draw(st.tuples(*[st.integers(0, 2)] * n))
    options["groups"] = draw(st.sampled_from([1, 1, 2]))
    channels = [options["groups"] * draw(st.integers(1, 2)) for _ in range(2)]
    if draw(st.booleans()):
        limits = [max(s, d) for s, d in zip(options["stride"], options["dilation"], strict=True)]
        options["output_padding"] = tuple(draw(st.integers(0, limit - 1)) for limit in limits)
        kind = TRANSPOSED[n]
    else:
        kind = CONVOLUTIONS[n]
    size = draw(st.tuples(*[st.integers(1, 3 if n == 3 else 5)] * n))
    batch = draw(st.integers(1, 2))
    return nn.Sequential(kind(*channels, **options)).double(), torch.randn(batch, channels[0], *size).double()


@given(data=convolutions(), split_dim=st.one_of(st.none(), st.integers(1, 9)))
def test_any_convolution(data, split_dim):
    model, x = data
    try:
        size = model(x).numel()
    except RuntimeError:  # the kernel does not fit, or nothing of the output is left
        assume(False)
    assume(size > 0)
    assert_matches_reference(model, x, loss_of(len(x)), terms=len(x), split_dim=split_dim)


def test_coverage_says_the_sizes():
    model = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose1d(6, 8, 5, groups=2), nn.Conv1d(8, 2, 1))
    entries = {entry.name: entry for entry in THOR(model).coverage()}
    found = {name: (entry.kind, entry.factor_sizes, entry.groups) for name, entry in entries.items()}
    assert found == {
        "0.weight": ("Conv1d", (6, 3), 2),
        "0.bias": ("Conv1d", (3,), 2),
        "1.weight": ("ConvTranspose1d", (15, 4), 2),
        "1.bias": ("ConvTranspose1d", (4,), 2),
        "2.weight": ("Conv1d", (8, 2), 1),
        "2.bias": ("Conv1d", (2,), 1),
    }
