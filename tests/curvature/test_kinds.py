"""The rows, matrices and loss terms of every kind of layer agree with loops and with autograd.

Attention, experts, recurrent and registered layers have files of their own.
"""

from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from timm.layers.conv2d_same import Conv2dSame
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from comparing import DAMPING, assert_matches_reference, having
from reference import Layer, gradients, rows_of
from reference.rows import is_standardised
from torch_thor import THOR
from torch_thor.curvature import Blocks, BlockSizes
from torch_thor.curvature.kinds import kind_of
from torch_thor.curvature.kinds import matrix as matrix_kinds

TORCHS = ("plain", "transposed")
STANDARDISED = (StdConv2d, StdConv2dSame, WeightStandardizedConv2d)
SCALED = (ScaledStdConv2d, ScaledStdConv2dSame)
EMBEDDINGS = (nn.Embedding, GemmaTextScaledWordEmbedding, BartScaledWordEmbedding)
small, sizes = st.integers(1, 3), st.integers(1, 7)


@st.composite
def of_vectors(draw):
    """(a linear layer or an embedding, its input, a mask of its rows)."""
    torch.manual_seed(0)  # what is assumed depends on the numbers
    inputs, outputs = draw(sizes), draw(sizes)
    leading = draw(st.lists(st.integers(1, 4), max_size=3))
    kind = draw(st.sampled_from([nn.Linear, Conv1D, *EMBEDDINGS]))
    is_linear = kind in (nn.Linear, Conv1D)
    if kind is Conv1D:
        layer = Conv1D(outputs, inputs)
    elif kind is nn.Linear:
        layer = nn.Linear(inputs, outputs, bias=draw(st.booleans()))
    else:
        options = {} if kind is nn.Embedding else {"embed_scale": 3.5}
        layer = kind(inputs, outputs, draw(st.none() | st.integers(0, inputs - 1)), **options)
    x = torch.randn(*leading, inputs).double() if is_linear else torch.randint(inputs, leading)
    keep = torch.rand(leading) < 0.7 if leading and draw(st.booleans()) else None
    counts = torch.ones(leading, dtype=torch.bool) if keep is None else keep
    if not is_linear and layer.padding_idx is not None:
        counts = counts & (x != layer.padding_idx)
    assume(counts.any())
    return layer.double(), x, keep


def every_other(*shape):
    return torch.randn([2 * n for n in shape])[(slice(None, None, 2),) * len(shape)]


VIEWS = {
    "plain": torch.randn,
    "steps": every_other,
    "channels_last": lambda *shape: torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1),
    "expanded": lambda *shape: torch.randn(1, *shape[1:]).expand(shape),
    "constant": lambda *shape: torch.randn(*shape[:2], *[1] * (len(shape) - 2)).expand(shape),
}


@st.composite
def of_images(draw, kinds, n):
    """(a convolution in n dimensions, its input, no mask)."""
    torch.manual_seed(0)
    kind, groups = draw(st.sampled_from(kinds)), draw(st.sampled_from([1, 1, 2, 3]))
    options = {"groups": groups, "bias": draw(st.booleans())}
    channels = [groups * draw(st.integers(1, 2)) for _ in range(2)]
    if kind in TORCHS:
        few = st.tuples(*[st.integers(1, 2 if n == 3 else 3)] * n)
        options |= {"kernel_size": draw(few), "stride": draw(few), "dilation": draw(few)}
        options["padding"] = draw(st.tuples(*[st.integers(0, 2)] * n))
    else:
        options |= {name: draw(small) for name in ("kernel_size", "stride", "dilation")}
        options |= {"eps": 0.1} if kind in STANDARDISED else {}
        options |= {"eps": 0.01, "gamma": 1.7} if kind in SCALED else {}
    if kind == "transposed":
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[n - 1]
        limits = [max(s, d) for s, d in zip(options["stride"], options["dilation"], strict=True)]
        options["output_padding"] = tuple(draw(st.integers(0, limit - 1)) for limit in limits)
    elif kind == "plain":
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1]
        modes = st.sampled_from(["zeros", "reflect", "replicate", "circular"])
        options["padding_mode"] = draw(modes)
        options["padding"] = draw(st.sampled_from(["same", "valid", options["padding"]]))
        options["stride"] = (1,) * n if options["padding"] == "same" else options["stride"]
    layer = kind(*channels, **options).double()
    if kind in SCALED:
        nn.init.normal_(layer.gain)
    size = draw(st.tuples(*[small if n == 3 else sizes] * n))
    images = draw(st.integers(0, 4))
    x = VIEWS[draw(st.sampled_from([*VIEWS]))](images or 1, channels[0], *size).double()
    x = x if images else x[0]  # a single image without a batch
    try:
        is_useful = bool((layer(x).abs() > 1e-6).any())  # not if it sees nothing but padding
    except (RuntimeError, ValueError):  # the kernel does not fit, or the padding is too large
        is_useful = False
    assume(is_useful)
    return layer, x, None


CONVOLUTIONS = [of_images(TORCHS, n) for n in (1, 2, 3)]


def chosen(count, most):
    """Indices of `most` rows, which stand for all: a row of each of `most` equal spans."""
    if most is None or count <= most:
        return list(range(count))
    drawn = torch.randint(2**16, (most,), generator=torch.Generator().manual_seed(0)).tolist()
    return [int((i + Fraction(place, 2**16)) * count / most) for i, place in enumerate(drawn)]


def summed(kind, x, output, *, keep=None, most=None):
    cut = BlockSizes.of(kind.inputs, 1 if kind.diagonal_input else None, kind.groups)
    a = Blocks(cut, torch.zeros(cut.rows, cut.width, dtype=torch.float64))
    before = x.clone()
    rows = kind.add_inputs_(a, x, torch.Size(output), keep, most)
    assert torch.equal(x, before)
    return rows, a.dense()


def close(found, wanted, **tolerances):
    torch.testing.assert_close(found, torch.as_tensor(np.array(wanted)), **tolerances)


LINEAR = nn.Linear(4, 3).double(), torch.randn(5, 5, 4).double(), None
OF_ANY_LAYER = given(
    case=st.one_of(of_vectors(), of_images((*STANDARDISED, *SCALED, Conv2dSame), 2), *CONVOLUTIONS),
    split_dim=st.none() | st.integers(1, 12),
    most=st.none() | st.integers(1, 30),
    piece=st.sampled_from([64, 2**23]),
)


@example(case=LINEAR, split_dim=3, most=5, piece=64)
def check_rows_and_matrices(case, split_dim, most, piece):
    """Rows go through memory in pieces; of many, `most` stand for all in A."""
    layer, x, keep = case
    mask, model = None if keep is None else keep.numpy(), nn.Sequential(layer)
    if hasattr(layer, "kernel_size"):
        has_batch = x.dim() == len(layer.kernel_size) + 2
    else:
        has_batch = x.dim() > x.is_floating_point()
    terms = len(x) if has_batch else 1
    optimizer = having(THOR(model, lr=0.0, damping=DAMPING, split_dim=split_dim), row_mask=keep)
    loss = lambda output: (output**3).sum() / terms  # noqa: E731
    output = model(x)
    with patch.dict(matrix_kinds._PIECE_BYTES, cpu=piece):
        loss(output).backward()
        optimizer.step()
    assert_matches_reference(
        model, x, loss, terms=terms, split_dim=split_dim, optimizer=optimizer, mask=mask
    )

    kind, (grads, uses) = kind_of(layer), gradients(model, x, loss)
    [(inputs, grad_y)], grad = uses["0"], grads["0.weight"]
    counting = [rows for rows, _ in rows_of(layer, inputs, grad_y, mask)]
    count = len(counting[0])  # a masked row neither stands for others nor is stood for
    places = chosen(count, most if x.is_floating_point() else None)
    rows, found = summed(kind, x, output.shape, keep=keep, most=most)
    assert rows == count
    for dense, of_group in zip(found, counting, strict=True):
        close(dense, of_group[places].T @ of_group[places] * (count / len(places)))

    # ∇W = Σ g aᵀ, a matrix a group: the loops and the matrix's order are right
    pairs, weight = rows_of(layer, inputs, grad_y), torch.as_tensor(grad)
    matrix = kind.to_matrix(weight)
    by_rows = matrix.mT if kind.transposed else matrix
    close(by_rows, Layer(layer, "").matrices(grad), rtol=0, atol=0)
    if not is_standardised(layer):
        close(by_rows, [g.T @ a for a, g in pairs], rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(Layer(layer, "").tensor(list(by_rows.numpy()), grad.shape), grad)
    back = weight.clone()
    again = kind.to_matrix(back).mul_(2.0)
    kind.from_matrix_(again, back)
    assert torch.equal(back, 2 * weight)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("examples", [80, pytest.param(400, marks=pytest.mark.slow)])
def test_rows_and_matrices_of_any_layer(examples):
    settings(max_examples=examples)(OF_ANY_LAYER(check_rows_and_matrices))()


class WithSize(nn.Module):
    """A transposed convolution that is called with the size of its output."""

    def __init__(self, sizes):
        super().__init__()
        self.conv = nn.ConvTranspose2d(2, 3, (3, 1), stride=3, padding=(1, 0)).double()
        self.sizes = list(sizes)

    def forward(self, x):
        return self.conv(x, self.sizes)


@pytest.mark.parametrize("sizes", [(10, 7), (11, 8), (12, 7), (10, 9)])
def test_output_size_given_to_the_call(sizes):
    model, x = WithSize(sizes), torch.randn(2, 2, 4, 3).double()

    def forward(model, x):
        y = model(x)
        return y, [("conv", x, y)]

    loss = lambda output: (output**3).sum() / 2  # noqa: E731
    assert_matches_reference(model, x, loss, terms=2, split_dim=4, forward=forward)
