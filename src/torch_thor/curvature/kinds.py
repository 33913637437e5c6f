"""What a layer is, to the curvature: its groups and sizes, and its input and output gradient as samples.

Each kind turns a layer's input into the paper's rows ``a`` and the gradient of its output into rows ``g``; both come
as ``(groups, features, rows)`` (features first, see :mod:`torch_thor.curvature.blocks`), in pieces small enough to
stay in cache, because the patches of a convolution repeat every pixel ``kernel height x kernel width`` times.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Patches are written once and read once; a piece that stays in the last-level cache makes that read free.
# (ResNet-50's 3x3 layers at 56x56, batch 8: 20 ms at once, 3 ms in pieces of one image.) A GPU wants few large pieces.
_PIECE_BYTES = {"cpu": 8 * 2**20}
_PIECE_BYTES_DEVICE = 256 * 2**20


class Kind(Protocol):
    """A layer's geometry: ``groups`` independent ``(outputs, inputs)`` matrices."""

    label: str
    groups: int
    inputs: int
    outputs: int

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of the layer's input, 1 if it is not batched."""
        ...

    def input_samples(self, x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the rows ``a`` as pieces ``(groups, inputs, rows)``."""
        ...

    def output_samples(self, g: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the rows ``g`` as pieces ``(groups, outputs, rows)``."""
        ...


class LinearKind:
    """``nn.Linear``: every leading index is a row.

    Args:
        module: the layer.
    """

    label = "Linear"
    groups = 1

    def __init__(self, module: nn.Linear) -> None:
        self.inputs = module.in_features
        self.outputs = module.out_features

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of ``x``, 1 for a single vector.

        Args:
            x: ``(..., in_features)``.

        Returns:
            The number of loss terms this input stands for by default.
        """
        return x.shape[0] if x.dim() > 1 else 1

    def input_samples(self, x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the input as one piece.

        Args:
            x: ``(..., in_features)``.
            dtype: dtype of the factors.

        Yields:
            ``(1, in_features, rows)``.
        """
        yield x.reshape(1, -1, self.inputs).to(dtype).mT

    def output_samples(self, g: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the output gradient as one piece.

        Args:
            g: ``(..., out_features)``.
            dtype: dtype of the factors.

        Yields:
            ``(1, out_features, rows)``.
        """
        yield g.reshape(1, -1, self.outputs).to(dtype).mT


class Conv2dKind:
    """``nn.Conv2d``: a row of ``a`` is a patch in the order of ``weight.flatten(1)``, a row of ``g`` an output pixel.

    Args:
        module: the layer.
    """

    label = "Conv2d"

    def __init__(self, module: nn.Conv2d) -> None:
        self.groups = module.groups
        self.kernel = (module.kernel_size[0], module.kernel_size[1])
        self.inputs = module.in_channels // module.groups * self.kernel[0] * self.kernel[1]
        self.outputs = module.out_channels // module.groups
        self.stride = (module.stride[0], module.stride[1])
        self.dilation = (module.dilation[0], module.dilation[1])
        self.padding = _paddings(module)
        self.padding_mode = "constant" if module.padding_mode == "zeros" else module.padding_mode

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of images, 1 for a single one.

        Args:
            x: ``(N, C, H, W)`` or ``(C, H, W)``.

        Returns:
            The number of loss terms this input stands for by default.
        """
        return x.shape[0] if x.dim() == 4 else 1

    def input_samples(self, x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the patches, a few images at a time.

        Args:
            x: ``(N, C, H, W)`` or ``(C, H, W)``.
            dtype: dtype of the factors.

        Yields:
            ``(groups, C / groups * kernel height * kernel width, images * output pixels)``.
        """
        x = x if x.dim() == 4 else x.unsqueeze(0)
        height, width = (self._output_size(x, d) for d in (0, 1))
        for piece in _pieces(x, self.groups * self.inputs * height * width * dtype.itemsize):
            padded = piece.to(dtype)
            if self.kernel != (1, 1):  # windows of a channels_last image would be gathered number by number
                padded = padded.contiguous()
            if any(self.padding):
                padded = F.pad(padded, self.padding, mode=self.padding_mode)
            # A view of every patch (channel, kernel row, kernel column, image, output row, output column), which
            # reshape turns into samples with a single copy; unfold would make one in the wrong order first.
            image, channel, row, column = padded.stride()
            windows = padded.as_strided(
                (x.shape[1], *self.kernel, len(padded), height, width),
                (
                    channel,
                    row * self.dilation[0],
                    column * self.dilation[1],
                    image,
                    row * self.stride[0],
                    column * self.stride[1],
                ),
                padded.storage_offset(),
            )
            yield windows.reshape(self.groups, self.inputs, -1)

    def output_samples(self, g: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the output gradient's pixels, a few images at a time.

        Args:
            g: ``(N, C_out, H_out, W_out)`` or ``(C_out, H_out, W_out)``.
            dtype: dtype of the factors.

        Yields:
            ``(groups, C_out / groups, images * output pixels)``.
        """
        g = g if g.dim() == 4 else g.unsqueeze(0)
        for piece in _pieces(g, g[:1].numel() * dtype.itemsize):
            yield piece.to(dtype).transpose(0, 1).reshape(self.groups, self.outputs, -1)

    def _output_size(self, x: Tensor, axis: int) -> int:
        before, after = self.padding[2 - 2 * axis], self.padding[3 - 2 * axis]
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (x.shape[2 + axis] + before + after - reach) // self.stride[axis] + 1


def _paddings(module: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return (left, right, top, bottom), also for "same" and "valid"."""
    if module.padding == "valid":
        return (0, 0, 0, 0)
    if module.padding == "same":  # an odd total has its extra pixel at the end, as torch has it
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        (top, bottom), (left, right) = ((t // 2, t - t // 2) for t in totals)
        return (left, right, top, bottom)
    vertical, horizontal = (int(p) for p in module.padding)
    return (horizontal, horizontal, vertical, vertical)


def _pieces(batch: Tensor, bytes_per_item: int) -> Iterator[Tensor]:
    budget = _PIECE_BYTES.get(batch.device.type, _PIECE_BYTES_DEVICE)
    yield from batch.split(max(1, budget // max(1, bytes_per_item)))


def kind_of(module: nn.Module) -> Kind | None:
    """Return the geometry of a module, or None where THOR has none for it.

    A subclass counts as its parent only while it computes what the parent computes: one that overrides ``forward``
    (a LoRA layer, a weight-standardised convolution) may use the weight in another way.

    Args:
        module: any module.

    Returns:
        Its kind, or None.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return LinearKind(module)
    if (
        isinstance(module, nn.Conv2d)
        and type(module).forward is nn.Conv2d.forward
        and type(module)._conv_forward is nn.Conv2d._conv_forward
    ):
        return Conv2dKind(module)
    return None
