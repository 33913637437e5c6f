"""Factors of convolutions, transposed and weight-standardised ones, against explicit loops."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from timm.layers.conv2d_same import Conv2dSame
from torch import nn
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d

from comparing import assert_matches_reference
from reference import Layer, gradients, rows_of
from tiny import CONVOLUTIONS, conv_model
from torch_thor import THOR

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
    "timm_same": (Conv2dSame, (2, 4, 3), {"stride": 2}, (5, 6)),
    "timm_same_even_dilated": (Conv2dSame, (2, 4, (4, 2)), {"dilation": (1, 3), "groups": 2}, (5, 7)),
    "timm_same_larger_stride": (Conv2dSame, (2, 4, 1), {"stride": 3}, (5, 7)),
}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def case(name, batch=3):
    """(a model with the named convolution, its input)."""
    if name in CONVOLUTIONS:
        return conv_model(name, batch)
    kind, channels, options, size = CASES[name]
    layer = kind(*channels, **options).double()
    if hasattr(layer, "gain"):
        nn.init.normal_(layer.gain)
    return nn.Sequential(layer), torch.randn(batch, channels[0], *size).double()


def check(model, x, terms, split_dim=None, **options):
    loss = lambda output: (output**3).sum() / terms  # noqa: E731
    return assert_matches_reference(model, x, loss, terms=terms, split_dim=split_dim, **options)


@pytest.mark.parametrize("name", [*CONVOLUTIONS, *CASES])
def test_factors(name):
    """With rows as the loops say; a single image is one term."""
    for split_dim in (None, 1, 5, 128):
        check(*case(name), terms=3, split_dim=split_dim)
    model, x = case(name)
    if name in CASES:
        check(model, x[0], terms=1)
    # the loops and the matrix's order are right: ∇W = Σ g aᵀ, a matrix a group; except where W is standardised
    grads, uses = gradients(model, case(name)[1], lambda output: (output**3).sum())
    for key, [(a, grad_y)] in uses.items():
        module = model.get_submodule(key)
        if type(module).__module__.startswith("torch."):
            layer, grad = Layer(module, f"{key}.weight"), grads[f"{key}.weight"]
            matrices = [g.T @ rows for rows, g in rows_of(module, a, grad_y)]
            np.testing.assert_allclose(layer.tensor(matrices, grad.shape), grad, rtol=1e-10, atol=1e-10)
            for there, back in zip(layer.matrices(grad), matrices, strict=True):
                np.testing.assert_allclose(there, back, rtol=1e-10, atol=1e-10)


@st.composite
def convolutions(draw):
    """(a convolution of any kind, its input)."""
    n = draw(st.integers(1, 3))
    small = st.tuples(*[st.integers(1, 2 if n == 3 else 3)] * n)
    options = {"kernel_size": draw(small), "stride": draw(small), "dilation": draw(small), "bias": draw(st.booleans())}
    options["padding"] = draw(st.tuples(*[st.integers(0, 2)] * n))
    options["groups"] = draw(st.sampled_from([1, 1, 2, 3]))
    channels = [options["groups"] * draw(st.integers(1, 2)) for _ in range(2)]
    if draw(st.booleans()):
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[n - 1]
        limits = [max(s, d) for s, d in zip(options["stride"], options["dilation"], strict=True)]
        options["output_padding"] = tuple(draw(st.integers(0, limit - 1)) for limit in limits)
    else:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1]
        options["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        options["padding"] = draw(st.sampled_from(["same", "valid", options["padding"]]))
        if options["padding"] == "same":
            options["stride"] = (1,) * n
    size = draw(st.tuples(*[st.integers(1, 3 if n == 3 else 7)] * n))
    batch = draw(st.integers(1, 3))
    return nn.Sequential(kind(*channels, **options)).double(), torch.randn(batch, channels[0], *size).double()


@settings(max_examples=60)
@given(data=convolutions(), split_dim=st.one_of(st.none(), st.integers(1, 12)))
def test_any_convolution(data, split_dim):
    model, x = data
    try:
        some = bool(model(x).any())  # not if there is no output, or it is that of the padding alone
    except RuntimeError:  # the kernel does not fit, the padding is larger than its mode allows, or nothing is left
        some = False
    assume(some)
    check(model, x, terms=len(x), split_dim=split_dim)


def test_output_size_given_to_the_call():
    """One stride makes several sizes possible; which one it was stands in the output alone."""

    class WithSize(nn.Module):
        def __init__(self, sizes, by_name):
            super().__init__()
            self.conv = nn.ConvTranspose2d(2, 3, (3, 1), stride=3, padding=(1, 0)).double()
            self.sizes, self.by_name = list(sizes), by_name

        def forward(self, x):
            return self.conv(input=x, output_size=self.sizes) if self.by_name else self.conv(x, self.sizes)

    def forward(model, x):
        y = model(x)
        return y, [("conv", x, y)]

    for sizes in ((10, 7), (11, 8), (12, 7), (10, 9)):
        for by_name in (True, False):
            x = torch.randn(2, 2, 4, 3).double()
            check(WithSize(sizes, by_name), x, terms=2, split_dim=4, forward=forward)


VIEWS = {
    "slice": lambda x: x[:, 1:3, 1:, 1:-1],
    "steps": lambda x: x[::2, ::2, ::2],
    "transposed": lambda x: x[:, 2:].transpose(2, 3),
    "channels_last": lambda x: x[:, :2].contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1, :2].expand(3, -1, -1, -1),
    "constant_images": lambda x: x[:, :2, :1, :1].expand(-1, -1, 5, 6),
    "gapped_batch": lambda x: x.flatten(0, 1)[1::3].unflatten(0, (2, 2)),
}


def test_convolution_of_a_view():
    """Patches are looked up by strides; whatever the strides of the input are, they are the same patches."""
    for view in VIEWS.values():
        for layer in (
            nn.Conv2d(2, 3, (2, 3), stride=(1, 2)),
            nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=1),
            nn.ConvTranspose2d(2, 2, 4, stride=2, padding=1),
            nn.ConvTranspose2d(2, 4, (2, 3), **ALL),
        ):
            x = view(torch.randn(3, 4, 6, 7, dtype=torch.float64))
            check(nn.Sequential(layer).double(), x, terms=len(x), split_dim=5)


def test_many_pieces_are_one_batch(monkeypatch):
    """Rows go through memory a few images at a time; a budget of a few numbers must change nothing."""
    monkeypatch.setattr("torch_thor.curvature.kinds.convolution._PIECE_BYTES", {"cpu": 64})
    for name in ("1d_all", "transposed_2d_uneven"):
        check(*case(name, batch=5), terms=5, split_dim=4)


def test_coverage():
    """The sizes, and no guess where the forward is not known; of other convolutions, see tests/optim/test_coverage."""
    layers = StdConv2d(4, 6, 3, groups=2), ScaledStdConv2d(6, 4, 1), Conv2dSame(4, 2, 3, stride=2)
    found = {e.name: (e.kind, e.factor_sizes, e.groups) for e in THOR(nn.Sequential(*layers)).coverage()}
    assert found == {
        "0.weight": ("StdConv2d", (18, 3), 2),
        "1.weight": ("ScaledStdConv2d", (6, 4), 1),
        "1.bias": ("ScaledStdConv2d", None, 1),
        "1.gain": ("ScaledStdConv2d", None, 1),
        "2.weight": ("Conv2d", (36, 2), 1),
        "2.bias": ("Conv2d", (2,), 1),
    }
    louder = type("Louder", (ScaledStdConv2d,), {"forward": lambda self, x: 2 * ScaledStdConv2d.forward(self, x)})
    strange = type("StdConv2d", (nn.Conv2d,), {"forward": lambda self, x: nn.Conv2d.forward(self, x) - 1})
    for kind in (louder, strange):
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
