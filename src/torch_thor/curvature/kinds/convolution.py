"""Convolutions and transposed convolutions in one, two and three dimensions: ``a`` is a patch, ``g`` an output pixel.

Patches are formed in pieces that are small enough to stay in the cache, because they repeat every pixel as often as the
kernel has taps. In shapes, ``*L`` stands for the spatial sizes.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.kinds.base import MatrixWeight, spacing
from torch_thor.curvature.kinds.patches import Patches, Reach, evenly_spread

# Patches are written once and read once; where a piece stays in the last-level cache, reading it costs next to nothing
# (3x3 layers of ResNet-50 at 56x56, batch 8: 20 ms as a whole, 3 ms in pieces of one image). A GPU is faster with few
# large pieces.
_PIECE_BYTES = {"cpu": 8 * 2**20}
_PIECE_BYTES_DEVICE = 256 * 2**20

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
_ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class ConvKind(MatrixWeight):
    """``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``: patches in the order of ``weight.flatten(1)``."""

    batch_first = True

    def __init__(self, module: _Conv | _ConvTranspose, *, same: bool = False) -> None:
        self.label = f"{'ConvTranspose' if module.transposed else 'Conv'}{len(module.kernel_size)}d"
        self.same = same
        self.groups = module.groups
        self.kernel = module.kernel_size
        self.stride = module.stride
        self.dilation = module.dilation
        self.inputs = module.in_channels // module.groups * math.prod(self.kernel)
        self.outputs = module.out_channels // module.groups
        self.padding = _paddings(module)
        self._kept: tuple[tuple[Any, ...], Patches] | None = None
        self.padding_mode = "constant" if module.padding_mode == "zeros" else module.padding_mode

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of images, 1 for an input without a batch dimension."""
        return x.shape[0] if x.dim() == len(self.kernel) + 2 else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return no dimensions: a patch has no single position in a sequence."""
        return torch.Size()

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Add the patches, a few images at a time; with ``most``, evenly spread patches of all images at once."""
        x, sizes, dtype = self._batched(x), output[-len(self.kernel) :], a.dtype
        pixels = math.prod(sizes)
        step = spacing(len(x) * pixels, most, pixels if len(x) == 1 else 1)  # several images differ in position
        if step > 1:
            x, reaches = self._reached(x, sizes)
            few = self._few(x, sizes, step, reaches)
            a.add_second_moment_(self._samples(self._ordered(few.of(x)).to(dtype)))
            return -(-len(x) * pixels // step)
        for piece in _pieces(x, self.groups * self.inputs * pixels * dtype.itemsize):
            a.add_second_moment_(self._samples(self._patches(piece.to(dtype), sizes)))
        return len(x) * pixels

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the pixels of the gradient of the output, a few images at a time."""
        grad, dtype = self._batched(grad), g.dtype
        for piece in _pieces(grad, grad[:1].numel() * dtype.itemsize):
            g.add_second_moment_(self._output_samples(piece.to(dtype)))

    def _batched(self, x: Tensor) -> Tensor:
        return x[None] if x.dim() < len(self.kernel) + 2 else x

    def _samples(self, patches: Tensor) -> Tensor:
        """Return patches ``(C_in, *kernel, ...)`` as rows ``a``, ``(groups, inputs, rows)``."""
        return patches.reshape(self.groups, self.inputs, -1)

    def _output_samples(self, grad: Tensor) -> Tensor:
        """Return the rows ``g``, ``(groups, outputs, rows)``."""
        return grad.transpose(0, 1).reshape(self.groups, self.outputs, -1)

    def _patches(self, x: Tensor, sizes: torch.Size) -> Tensor:
        """Return all patches, ``(C_in, *kernel, N, *sizes)``, a layout that becomes samples with a single copy."""
        if math.prod(self.kernel) > 1:  # windows of a channels_last image would be copied number by number
            x = x.contiguous()
        return self._ordered(self._windows(x, sizes))

    def _windows(self, x: Tensor, sizes: torch.Size) -> Tensor:
        """Return all patches as a view of the padded images, with their taps in the order of memory."""
        padding = self._same_padding(x, sizes) if self.same else self.padding
        if any(padding):
            x = F.pad(x, padding, mode="constant" if self.same else self.padding_mode)
        return windows_of(x, self.kernel, self.dilation, self.stride, sizes)

    def _reached(self, x: Tensor, sizes: torch.Size) -> tuple[Tensor, list[Reach]]:
        """Return the images, padded unless with zeros, and the reach of an output pixel in each dimension."""
        padding = self._same_padding(x, sizes) if self.same else self.padding
        if any(padding) and self.padding_mode != "constant" and not self.same:
            x, padding = F.pad(x, padding, mode=self.padding_mode), (0,) * len(padding)
        before = padding[-2::-2]  # pairs (before, after), the last dimension first
        return x, [Reach(*each) for each in zip(self.kernel, self.stride, self.dilation, before, strict=True)]

    def _few(self, x: Tensor, sizes: torch.Size, step: int, reaches: list[Reach]) -> Patches:
        """Return the positions of one in ``step`` patches of all images; those of the latest shape are cached."""
        key = (x.shape, sizes, step, x.device)
        if self._kept is None or self._kept[0] != key:
            rows = evenly_spread(len(x), math.prod(sizes), step, x.device)
            self._kept = key, Patches(rows, x.shape[2:], sizes, reaches)
        return self._kept[1]

    def _ordered(self, windows: Tensor) -> Tensor:
        """Return windows with their taps in the order of the columns of the weight."""
        return windows

    def _same_padding(self, x: Tensor, sizes: torch.Size) -> tuple[int, ...]:
        """Return the padding, (before, after) per dimension, the last first; an odd total has its extra pixel after."""
        padding: list[int] = []
        for i in reversed(range(len(self.kernel))):
            reach = (sizes[i] - 1) * self.stride[i] + self.dilation[i] * (self.kernel[i] - 1) + 1
            total = max(reach - x.shape[2 + i], 0)
            padding += [total // 2, total - total // 2]
        return tuple(padding)


def windows_of(
    x: Tensor, kernel: tuple[int, ...], dilation: tuple[int, ...], stride: tuple[int, ...], sizes: torch.Size
) -> Tensor:
    """Return all windows of ``(N, C, *L)`` as a view, ``(C, *kernel, N, *sizes)``."""
    image, channel, *pixel = x.stride()
    return x.as_strided(
        (x.shape[1], *kernel, x.shape[0], *sizes),
        (
            channel,
            *(p * d for p, d in zip(pixel, dilation, strict=True)),
            image,
            *(p * s for p, s in zip(pixel, stride, strict=True)),
        ),
        x.storage_offset(),
    )


def _paddings(module: _Conv | _ConvTranspose) -> tuple[int, ...]:
    """Return the padding of a layer, (before, after) per dimension, the last first, also for "same" and "valid"."""
    if module.padding == "valid":
        return (0, 0) * len(module.kernel_size)
    if module.padding == "same":  # as in torch, an odd total has its extra pixel at the end
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple(n for t in reversed(totals) for n in (t // 2, t - t // 2))
    margins: tuple[int, ...] = module.padding  # type: ignore[assignment]  # not a string: both are handled above
    return tuple(n for p in reversed(margins) for n in (p, p))


def _pieces(batch: Tensor, bytes_per_item: int) -> Iterator[Tensor]:
    budget = _PIECE_BYTES.get(batch.device.type, _PIECE_BYTES_DEVICE)
    yield from batch.split(max(1, budget // max(1, bytes_per_item)))
