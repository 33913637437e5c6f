"""Convolutions in one, two and three dimensions, and their transposes: a row of ``a`` is a patch, of ``g`` a pixel.

Samples come in pieces small enough to stay in cache, because the patches of a convolution repeat every pixel as often
as the kernel has taps. ``n`` is the number of spatial dimensions, ``*L`` stands for that many sizes.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.kinds.base import shares_memory, spacing
from torch_thor.curvature.kinds.patches import Patches, Reach, evenly_spread

# Patches are written once and read once; a piece that stays in the last-level cache makes that read free.
# (ResNet-50's 3x3 layers at 56x56, batch 8: 20 ms at once, 3 ms in pieces of one image.) A GPU wants few large pieces.
_PIECE_BYTES = {"cpu": 8 * 2**20}
_PIECE_BYTES_DEVICE = 256 * 2**20

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
_ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class ConvKind:
    """``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``: patches in the order of ``weight.flatten(1)``.

    Args:
        module: the layer.
        same: whether it pads its input by itself, as TensorFlow's "SAME" does, so that ``ceil(size / stride)`` pixels
            come out; ``module.padding`` is then not looked at.
    """

    diagonal_input = False
    transposed = False
    solves_biases = True
    routed = False

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
        """Return the number of images, 1 for a single one.

        Args:
            x: ``(N, C, *L)`` or ``(C, *L)``.

        Returns:
            The number of loss terms this input stands for by default.
        """
        return x.shape[0] if x.dim() == len(self.kernel) + 2 else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return no dimensions: a patch has no one place in a sequence.

        Args:
            x: the input.

        Returns:
            ``()``.
        """
        return torch.Size()

    def add_inputs_(
        self, a: BlockDiagonal, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Add the patches, a few images at a time; where fewer are enough, those of all images.

        Args:
            a: the input factor, changed in place.
            x: ``(N, C_in, *L)`` or ``(C_in, *L)``.
            output: ``(N, C_out, *L_out)`` or ``(C_out, *L_out)``.
            keep: not used.
            most: how many rows are enough; None for all.

        Returns:
            The number of rows: images times output pixels, where all are taken.
        """
        x, sizes, dtype = self._batched(x), output[-len(self.kernel) :], a.blocks.dtype
        pixels = math.prod(sizes)
        step = spacing(len(x) * pixels, most, pixels if len(x) == 1 else 1)  # of more, each has other places
        if step > 1:
            x, reaches = self._reached(x, sizes)
            few = self._few(x, sizes, step, reaches)
            a.add_second_moment_(self._samples(self._ordered(few.of(x)).to(dtype)))
            return -(-len(x) * pixels // step)
        for piece in _pieces(x, self.groups * self.inputs * pixels * dtype.itemsize):
            a.add_second_moment_(self._samples(self._patches(piece.to(dtype), sizes)))
        return len(x) * pixels

    def add_outputs_(self, g: BlockDiagonal, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the output's pixels, a few images at a time.

        Args:
            g: the output factor, changed in place.
            x: not used.
            grad: ``(N, C_out, *L_out)`` or ``(C_out, *L_out)``.
            keep: not used.
        """
        grad, dtype = self._batched(grad), g.blocks.dtype
        for piece in _pieces(grad, grad[:1].numel() * dtype.itemsize):
            g.add_second_moment_(self._output_samples(piece.to(dtype)))

    def _batched(self, x: Tensor) -> Tensor:
        return x[None] if x.dim() < len(self.kernel) + 2 else x

    def _samples(self, patches: Tensor) -> Tensor:
        """Return patches ``(C_in, *kernel, ...)`` as rows of ``a``, ``(groups, inputs, rows)``."""
        return patches.reshape(self.groups, self.inputs, -1)

    def _output_samples(self, grad: Tensor) -> Tensor:
        """Return the rows of ``g``, ``(groups, outputs, rows)``."""
        return grad.transpose(0, 1).reshape(self.groups, self.outputs, -1)

    def _patches(self, x: Tensor, sizes: torch.Size) -> Tensor:
        """Return every patch, ``(C_in, *kernel, N, *sizes)``: reshape then makes samples with a single copy."""
        if math.prod(self.kernel) > 1:  # windows of a channels_last image would be gathered number by number
            x = x.contiguous()
        return self._ordered(self._windows(x, sizes))

    def _windows(self, x: Tensor, sizes: torch.Size) -> Tensor:
        """Return every patch as a view of the padded images, in the order of memory."""
        padding = self._same_padding(x, sizes) if self.same else self.padding
        if any(padding):
            x = F.pad(x, padding, mode="constant" if self.same else self.padding_mode)
        return _windows(x, self.kernel, self.dilation, self.stride, sizes)

    def _reached(self, x: Tensor, sizes: torch.Size) -> tuple[Tensor, list[Reach]]:
        """Return images, padded unless with zeros, and what each dimension of the output sees of them."""
        padding = self._same_padding(x, sizes) if self.same else self.padding
        if any(padding) and self.padding_mode != "constant" and not self.same:
            x, padding = F.pad(x, padding, mode=self.padding_mode), (0,) * len(padding)
        before = padding[-2::-2]  # the last dimension comes first, each with what is before it and after
        return x, [Reach(*each) for each in zip(self.kernel, self.stride, self.dilation, before, strict=True)]

    def _few(self, x: Tensor, sizes: torch.Size, step: int, reaches: list[Reach]) -> Patches:
        """Return where one in ``step`` patches of all images lie; those of the latest shape are kept."""
        key = (x.shape, sizes, step, x.device)
        if self._kept is None or self._kept[0] != key:
            rows = evenly_spread(len(x), math.prod(sizes), step, x.device)
            self._kept = key, Patches(rows, x.shape[2:], sizes, reaches)
        return self._kept[1]

    def _ordered(self, windows: Tensor) -> Tensor:
        """Return windows with their taps in the order of the weight's columns."""
        return windows

    def _same_padding(self, x: Tensor, sizes: torch.Size) -> tuple[int, ...]:
        """Return (before, after) of each dimension, the last first: what these sizes need, the odd pixel at the end."""
        padding: list[int] = []
        for i in reversed(range(len(self.kernel))):
            reach = (sizes[i] - 1) * self.stride[i] + self.dilation[i] * (self.kernel[i] - 1) + 1
            total = max(reach - x.shape[2 + i], 0)
            padding += [total // 2, total - total // 2]
        return tuple(padding)

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as matrices, a group each.

        Args:
            tensor: ``(C_out, C_in / groups, *kernel)``.

        Returns:
            ``(groups, outputs, inputs)``; a copy for channels_last, where rows of ``flatten(1)`` are no view.
        """
        return tensor.reshape(self.groups, self.outputs, self.inputs)

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Write a matrix back.

        Args:
            matrix: what :meth:`to_matrix` gave, changed.
            tensor: what it was given.
        """
        if not shares_memory(matrix, tensor):
            tensor.copy_(matrix.view(tensor.shape))


class ConvTransposeKind(ConvKind):
    """``nn.ConvTranspose1d`` to ``3d``: the pixels of the input that one pixel of the output sees.

    A transposed convolution is a convolution with the flipped kernel over the input with ``stride - 1`` zeros between
    its pixels, so its rows are patches of that, in the order (input channel, kernel taps as in the weight). Columns of
    the weight's matrix follow the same order: ``weight.transpose(0, 1).flatten(1)``, a group at a time.

    Args:
        module: the layer.
    """

    def _windows(self, x: Tensor, sizes: torch.Size) -> Tensor:
        spread = x
        if any(s > 1 for s in self.stride):
            lengths = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], self.stride, strict=True)]
            spread = x.new_zeros(*x.shape[:2], *lengths)
            places = (slice(None), slice(None), *(slice(None, None, s) for s in self.stride))
            spread[places] = x
        margins: list[int] = []  # last dimension first, as F.pad wants them; negative ones crop
        for i in reversed(range(len(self.kernel))):
            reach = self.dilation[i] * (self.kernel[i] - 1)
            before = reach - self.padding[-2 * i - 1]
            # sizes, not output_padding: forward() takes an output_size of its own
            margins += [before, sizes[i] + reach - before - spread.shape[2 + i]]
        spread = F.pad(spread.contiguous(), margins)
        return _windows(spread, self.kernel, self.dilation, (1,) * len(self.kernel), sizes)

    def _reached(self, x: Tensor, sizes: torch.Size) -> tuple[Tensor, list[Reach]]:
        before = self.padding[-2::-2]
        return x, [
            Reach(kernel, 1, dilation, dilation * (kernel - 1) - pad, stride)
            for kernel, stride, dilation, pad in zip(self.kernel, self.stride, self.dilation, before, strict=True)
        ]

    def _ordered(self, windows: Tensor) -> Tensor:
        return windows.flip(tuple(range(1, 1 + len(self.kernel))))

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as matrices, a group each.

        Args:
            tensor: ``(C_in, C_out / groups, *kernel)``.

        Returns:
            ``(groups, outputs, inputs)``, a copy unless the kernel has one output channel a group.
        """
        taps = math.prod(self.kernel)
        by_group = tensor.reshape(self.groups, self.inputs // taps, self.outputs, taps)
        return by_group.transpose(1, 2).reshape(self.groups, self.outputs, self.inputs)

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Write a matrix back.

        Args:
            matrix: what :meth:`to_matrix` gave, changed.
            tensor: what it was given.
        """
        if not shares_memory(matrix, tensor):
            taps = math.prod(self.kernel)
            by_group = matrix.view(self.groups, self.outputs, self.inputs // taps, taps)
            tensor.copy_(by_group.transpose(1, 2).reshape(tensor.shape))


def _windows(
    x: Tensor, kernel: tuple[int, ...], dilation: tuple[int, ...], stride: tuple[int, ...], sizes: torch.Size
) -> Tensor:
    """Return a view of every window of ``(N, C, *L)``: ``(C, *kernel, N, *sizes)``."""
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
    """Return (before, after) of each dimension, the last dimension first, also for "same" and "valid"."""
    if module.padding == "valid":
        return (0, 0) * len(module.kernel_size)
    if module.padding == "same":  # an odd total has its extra pixel at the end, as torch has it
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple(n for t in reversed(totals) for n in (t // 2, t - t // 2))
    margins: tuple[int, ...] = module.padding  # type: ignore[assignment]  # no string: those are dealt with
    return tuple(n for p in reversed(margins) for n in (p, p))


def _pieces(batch: Tensor, bytes_per_item: int) -> Iterator[Tensor]:
    budget = _PIECE_BYTES.get(batch.device.type, _PIECE_BYTES_DEVICE)
    yield from batch.split(max(1, budget // max(1, bytes_per_item)))
