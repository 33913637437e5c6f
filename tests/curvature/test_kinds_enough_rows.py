"""`most` of each kind of layer: which rows are left, their number and their sum, against slow calculations."""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from timm.layers import ScaledStdConv2d, StdConv2dSame
from torch import nn
from transformers.pytorch_utils import Conv1D

from reference import keep_blocks
from reference.rows import CONVOLUTIONS, conv_input_rows, is_standardised, transposed_input_rows
from torch_thor.curvature import Blocks, Cut, ProjectionKind
from torch_thor.curvature.kinds import PackedCall, kind_of
from torch_thor.curvature.kinds.base import spacing
from torch_thor.curvature.kinds.convolution import evenly_spread
from torch_thor.curvature.kinds.experts import ExpertsKind

MOST = [1, 2, 3, 5, 7, 11, 12, 13, 24, 100, None]


def chosen(count, most, period):
    """Indices of every k-th: k is the largest that leaves `most` and has no factor in common with the period."""
    fitting = [
        k
        for k in range(1, count + 1)
        if k == 1 or (most is not None and count >= most * k and all(period % f or k % f for f in range(2, period + 1)))
    ]
    return [i for i in range(count) if i % max(fitting, default=1) == 0]


def summed(kind, x, output, *, keep=None, most=None, split_dim=None):
    cut = Cut.of(kind.inputs, 1 if kind.diagonal_input else split_dim, kind.groups)
    a = Blocks.zeros(cut, torch.float64, torch.device("cpu"))
    before = x.clone()
    rows = kind.add_inputs_(a, x, torch.Size(output), keep, most)
    assert torch.equal(x, before)
    return rows, a.dense()


def second_moment(rows):
    return torch.from_numpy(sum((np.outer(row, row) for row in rows), np.zeros((rows.shape[1],) * 2)))


def test_every_so_many():
    for period, count, most in product((1, 2, 4, 5, 6, 9), range(1, 40), (*range(1, 45), None)):
        found = list(range(0, count, spacing(count, most, period)))
        assert found == chosen(count, most, period)
        assert most is None or min(count, most) <= len(found)
    # every place in a sample has its turn: of 64 images of 6 pixels not every 24th, always the first pixel, is taken
    assert spacing(64 * 6, 16, 6) == 23
    assert {row % 6 for row in range(0, 64 * 6, 23)} == set(range(6))


def test_rows_of_sequences():
    """Of those that count: a masked row is neither taken nor stepped over."""
    kinds = [kind_of(nn.Linear(4, 3)), kind_of(Conv1D(3, 4)), ProjectionKind(torch.zeros(3, 4), "MultiheadAttention")]
    kinds.append(PackedCall(torch.zeros(3, 4), "LSTM", 5))
    for kind, most, split_dim, share in product(kinds, MOST, (None, 3), (1.0, 0.7, 0.0)):
        x, keep = torch.randn(5, 5, 4).double(), torch.rand(5, 5) < share
        rows, [found] = summed(kind, x, (5, 5, 3), keep=None if share == 1 else keep, most=most, split_dim=split_dim)
        counting = x[keep].numpy()
        wanted = counting[chosen(len(counting), most, 5)]
        assert rows == len(wanted), (kind.label, most, split_dim, share)
        assert share or not rows
        whole = second_moment(wanted).numpy()
        torch.testing.assert_close(found, torch.from_numpy(keep_blocks(whole, split_dim)))


IMAGES = {
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2), (7,)),
    "conv2d": (lambda: nn.Conv2d(2, 4, (3, 2), padding=1, groups=2), (3, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (2, 3, 2)),
    "reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), (1, 2)),
    "standardised": (lambda: ScaledStdConv2d(2, 4, 3, padding=1, groups=2), (3, 2)),
    "standardised_same": (lambda: StdConv2dSame(2, 4, 3, stride=2), (5, 3)),
}


def chosen_patches(images, pixels, most):
    """Every k-th, where the places of image i are those of image 0 shifted by i times the golden ratio."""
    k = 1 if most is None else max(1, images * pixels // most)
    if k == 1:
        return list(range(images * pixels))
    places = []
    for row in range(0, images * pixels, k):
        image = row // pixels
        places.append(image * pixels + (row + image * pixels * 618034 // 1000000) % pixels)
    return places


@pytest.mark.parametrize("name", IMAGES)
def test_patches_of_all_images(name):
    """Pixel after pixel and image after image, every so many."""
    make, size = IMAGES[name]
    module = make().double()
    for most, channels_last in product((1, 5, 6, 7, 13, 24, 25, 60, 1000, None), (False, True)):
        x = torch.randn(9, 4 if name == "transposed" else 2, *size).double()
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x
        output = module(x).shape
        pixels = math.prod(output[2:])
        places = chosen_patches(9, pixels, most)
        assert len(set(places)) == len(places)
        rows, found = summed(kind_of(module), x, output, most=most)
        assert rows == len(places)
        assert most is None or rows >= min(most, 9 * pixels)
        for group, dense in enumerate(found):
            if isinstance(module, CONVOLUTIONS):
                wanted = conv_input_rows(x.numpy(), module, group)[places]
            else:
                wanted = transposed_input_rows(x.numpy(), module, group, tuple(output[2:]))[places]
            if is_standardised(module):
                wanted = np.array([row - sum(row) / len(row) for row in wanted])
            torch.testing.assert_close(dense, second_moment(wanted))


def test_every_pixel_of_an_image_has_its_turn():
    """Of 64 images of 16 pixels every second patch: not always the same eight pixels of an image."""
    assert {place % 16 for place in evenly_spread(64, 16, 2, torch.device("cpu")).tolist()} == set(range(16))
    seen = Counter(place % 16 for place in evenly_spread(512, 16, 8, torch.device("cpu")).tolist())
    assert max(seen.values()) <= 1.5 * min(seen[pixel] for pixel in range(16))


def test_batches_of_other_shapes_have_places_of_their_own():
    """And one image alone: 12 pixels, of which 2 are enough: not every 6th, 4th, 3rd or 2nd, but every 5th."""
    module = nn.Conv2d(2, 3, 3, padding=1).double()
    kind = kind_of(module)
    for shape in ((9, 2, 3, 4), (9, 2, 5, 4), (7, 2, 5, 4), (9, 2, 3, 4), (2, 4, 3)):
        x = torch.randn(shape).double()
        rows, [found] = summed(kind, x, module(x).shape, most=2 if x.dim() == 3 else 6)
        places = [0, 5, 10] if x.dim() == 3 else chosen_patches(shape[0], shape[2] * shape[3], 6)
        assert rows == len(places)
        torch.testing.assert_close(found, second_moment(conv_input_rows(x.numpy(), module, 0)[places]))


def test_all_tokens_and_all_rows_of_experts_count():
    """How often a token comes, and how many rows an expert has, is what weighs it."""
    tokens, x = torch.tensor([[0, 2, 2], [1, 2, 4]]), torch.randn(5, 4).double()
    for most in (1, 4, None):
        rows, [found] = summed(kind_of(nn.Embedding(5, 3, padding_idx=1)), tokens, (2, 3, 3), most=most)
        assert rows == 5
        assert found.diag().tolist() == [1.0, 0.0, 3.0, 0.0, 1.0]
        for which, of_rows in (
            (1, [1] * 5),
            (torch.tensor([2, 0, 2, 2, 0]), [2, 0, 2, 2, 0]),
            ((2, 0, 3), [0, 0, 2, 2, 2]),
        ):
            kind = ExpertsKind(torch.zeros(3, 6, 4), inputs_first=False).of_call(which)
            rows, found = summed(kind, x, (5, 6), most=most)
            assert rows == [of_rows.count(e) for e in range(3)]
            for expert, dense in enumerate(found):
                own = x[[row for row in range(5) if of_rows[row] == expert]]
                torch.testing.assert_close(dense, second_moment(own.numpy()))
