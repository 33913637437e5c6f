"""Reads some patches of a batch of images directly, without forming padded images or the other patches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The golden ratio: positions are shifted by it from image to image, so that they are spread evenly over all positions.
_GOLDEN = (618_034, 1_000_000)


@dataclass(frozen=True)
class Reach:
    """Which pixels of the input one pixel of the output depends on, in one dimension."""

    kernel: int  # the number of taps
    stride: int  # the distance of neighbouring output pixels, in positions of the input
    dilation: int  # the distance of neighbouring taps, in positions of the input
    before: int  # the number of zeros before the first pixel; negative where pixels are cropped
    spread: int = 1  # 1, or the stride of a transposed convolution


def evenly_spread(images: int, pixels: int, step: int, device: torch.device) -> Tensor:
    """Return one in ``step`` patches of a batch, from all images and all positions in them."""
    rows = torch.arange(0, images * pixels, step, device=device)
    image = rows // pixels
    shift = image * (pixels * _GOLDEN[0]) // _GOLDEN[1]
    return image * pixels + (rows + shift) % pixels


class Patches:
    """The positions of some patches in a batch of images, which can be reused for further batches of the same shape."""

    def __init__(self, rows: Tensor, lengths: Sequence[int], sizes: Sequence[int], reaches: Sequence[Reach]) -> None:
        self._kernel = tuple(reach.kernel for reach in reaches)
        device, pixels = rows.device, math.prod(sizes)
        places = torch.unravel_index(rows % pixels, tuple(sizes))
        taps = torch.unravel_index(torch.arange(math.prod(self._kernel), device=device), self._kernel)
        pixel = torch.zeros((), dtype=torch.long, device=device)
        inside = torch.ones((), dtype=torch.bool, device=device)
        for length, reach, place, tap in zip(lengths, reaches, places, taps, strict=True):
            at = place[:, None] * reach.stride - reach.before + tap * reach.dilation
            inside = inside & (at >= 0) & (at % reach.spread == 0)
            at = at.div(reach.spread, rounding_mode="floor")
            inside = inside & (at < length)
            pixel = pixel * length + at.clamp_(0, length - 1)
        self._image = (rows // pixels)[:, None]
        self._pixel = pixel  # (count, taps), indices into the pixels of one image
        self._flat = (self._image * math.prod(lengths) + pixel).flatten()  # indices into the pixels of the batch
        self._outside = None if bool(inside.all()) else ~inside[..., None]

    def of(self, x: Tensor) -> Tensor:
        """Return the patches."""
        pixels = x.flatten(2).movedim(1, -1)
        if pixels.is_contiguous():  # channels_last: the channels of a pixel are copied together
            found = pixels.flatten(0, 1).index_select(0, self._flat).view(*self._pixel.shape, -1)
        else:
            found = pixels[self._image, self._pixel]
        if self._outside is not None:
            found.masked_fill_(self._outside, 0)
        patches: Tensor = found.permute(2, 1, 0).unflatten(1, self._kernel)
        return patches
