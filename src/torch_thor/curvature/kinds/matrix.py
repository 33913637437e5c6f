"""Layers whose weight is one matrix, or one for each group: linear layers and convolutions.

The row ``a`` of a convolution is a patch, and ``g`` an output pixel. A transposed convolution is a
convolution of stride 1, with a mirrored kernel, of pixels that are ``stride`` apart. Patches are
formed in pieces that are small enough to stay in the cache, because they repeat every pixel as
often as the kernel has taps.
"""

import math
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_thor.curvature.blocks import Blocks, to_device, widened
from torch_thor.curvature.geometry import Geometry

# Patches are written once and read once; where a piece stays in the last-level cache, reading it
# costs next to nothing (3x3 layers of ResNet-50 at 56x56, batch 8: 20 ms as a whole, 3 ms in pieces
# of one image). A GPU is faster with few large pieces.
_PIECE_BYTES = {"cpu": 8 * 2**20}
_PIECE_BYTES_DEVICE = 256 * 2**20


class MatrixWeight:
    """A base class for kinds whose weight has its matrices one after the other.

    They are in their own memory layout.
    """

    groups = 1
    inputs: int
    outputs: int
    diagonal_input = False
    transposed = False
    solves_biases = True
    has_own_rows = False
    taps = 0  # of a transposed convolution, whose weight is (in, out, taps)

    @cached_property
    def geometry(self) -> Geometry:
        """The matrices of the weight."""
        return self._plain

    @property
    def _plain(self) -> Geometry:
        """The same, also of a subclass that has another ``to_matrix``."""
        return Geometry(self.groups, self.outputs, self.inputs, self.transposed, self.taps)

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as matrices."""
        return self._plain.to_matrix(tensor)

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Copy changed matrices back into their tensor, unless they are a view of it."""
        self._plain.from_matrix_(matrix, tensor)


class LinearKind(MatrixWeight):
    """``nn.Linear``, for which every leading index of the input is a row.

    It is a base class for layers that differ in the weight.
    """

    label = "Linear"

    def __init__(self, module: nn.Module) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.outputs, self.inputs = weight.shape

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of ``x``, 1 for a single vector."""
        return x.shape[0] if x.dim() > 1 else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the leading dimensions of the input."""
        return x.shape[:-1]

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Add the rows of the input."""
        rows = x.reshape(-1, self.inputs)
        rows = rows if keep is None else rows[keep.reshape(-1)]
        chosen = standing_for_all(len(rows), most, x.device)
        few = rows if chosen is None else rows[chosen]
        a.add_second_moment_(few.to(a.rows.dtype).mT[None], len(rows) / max(1, len(few)))
        return len(rows)

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the rows of the gradient of the output."""
        rows = grad.reshape(-1, self.outputs)
        rows = rows if keep is None else rows[keep.reshape(-1)]
        g.add_second_moment_(rows.to(g.rows.dtype).mT[None])


class TransposedLinearKind(LinearKind):
    """Hugging Face's ``Conv1D``, the linear layer of GPT-2, whose weight is ``(in, out)``."""

    label = "Conv1D"
    transposed = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inputs, self.outputs = self.outputs, self.inputs


class ProjectionKind(LinearKind):
    """A linear layer inside a composite module.

    It receives its inputs batch first, ``(N, ..., in)``.

    The module computes it without calling a module for it: a projection of an attention, a gate
    matrix of a recurrent layer (:mod:`torch_thor.capture.composites`). Its weight is a parameter,
    or rows of a fused weight.

    Args:
        weight: the weight, ``(out, in)``, of which only the shape is used.
        label: the name of the kind in ``optimizer.coverage()``.
    """

    def __init__(self, weight: Tensor, label: str) -> None:
        self.outputs, self.inputs = weight.shape
        self.label = label


class PackedCall(ProjectionKind):
    """One call of a projection on packed sequences.

    Its rows are all their time steps, ``(rows, in)``.
    """

    def __init__(self, weight: Tensor, label: str, sequences: int) -> None:
        super().__init__(weight, label)
        self._sequences = sequences

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of sequences."""
        return self._sequences

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return no dimensions: a mask of padded sequences does not fit packed sequences."""
        return torch.Size()


class ConvKind(MatrixWeight):
    """``nn.Conv1d`` to ``3d`` and ``nn.ConvTranspose1d`` to ``3d``.

    With ``same`` it pads with zeros as TensorFlow does.
    """

    def __init__(self, module: Any, *, same: bool = False) -> None:
        self.label = f"{'ConvTranspose' if module.transposed else 'Conv'}{len(module.kernel_size)}d"
        self.kernel, self.stride, self.dilation = module.kernel_size, module.stride, module.dilation
        taps = math.prod(self.kernel)
        self.taps = taps if module.transposed else 0
        self.groups = module.groups
        self.inputs = module.in_channels // module.groups * taps
        self.outputs = module.out_channels // module.groups
        self._mode = "constant" if same or module.padding_mode == "zeros" else module.padding_mode
        # the number of pixels before the image in each dimension
        self._before = None if same else module.padding
        if module.padding == "valid":
            self._before = (0,) * len(self.kernel)
        elif module.padding == "same":  # as in torch, an odd total has its extra pixel at the end
            self._before = tuple(
                d * (k - 1) // 2 for d, k in zip(self.dilation, self.kernel, strict=True)
            )
        # for one shape of images, which of their pixels some patches consist of
        self._latest: tuple[Any, ...] = ()

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of images, 1 for an input without a batch dimension."""
        return x.shape[0] if x.dim() == len(self.kernel) + 2 else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return no dimensions: a patch has no single position in a sequence."""
        return torch.Size()

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Add the patches, a few images at a time; with ``most``, so many of them at once."""
        x = x[None] if x.dim() < len(self.kernel) + 2 else x
        sizes = output[-len(self.kernel) :]
        pixels = math.prod(sizes)
        if most is not None and len(x) * pixels > most:
            few = self._few(x, sizes, most).to(a.rows.dtype)
            a.add_second_moment_(self._samples(few), len(x) * pixels / most)
            return len(x) * pixels
        budget = _PIECE_BYTES.get(x.device.type, _PIECE_BYTES_DEVICE)
        image_bytes = self.groups * self.inputs * pixels * a.rows.dtype.itemsize
        for piece in x.split(max(1, budget // max(1, image_bytes))):
            images = piece.to(a.rows.dtype)
            # windows of a channels_last image would be copied number by number
            if math.prod(self.kernel) > 1:
                images = images.contiguous()
            a.add_second_moment_(self._samples(self._windows(images, sizes)))
        return len(x) * pixels

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the pixels of the gradient of the output, a few images at a time."""
        grad = grad[None] if grad.dim() < len(self.kernel) + 2 else grad
        budget = _PIECE_BYTES.get(grad.device.type, _PIECE_BYTES_DEVICE)
        for piece in grad.split(max(1, budget // max(1, grad[:1].numel() * g.rows.dtype.itemsize))):
            g.add_second_moment_(
                piece.to(g.rows.dtype).transpose(0, 1).reshape(self.groups, self.outputs, -1)
            )

    def _samples(self, patches: Tensor) -> Tensor:
        """Return patches ``(C_in, *kernel, ...)`` as rows ``a``, ``(groups, inputs, rows)``."""
        return patches.reshape(self.groups, self.inputs, -1)

    def _windows(self, x: Tensor, sizes: torch.Size) -> Tensor:
        """Return all patches ``(C_in, *kernel, N, *sizes)``; taps in the order of the columns."""
        stride = self.stride
        if self.taps:
            sizes_apart = ((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True))
            apart = x.new_zeros(*x.shape[:2], *sizes_apart)
            places: Any = (..., *(slice(None, None, s) for s in stride))
            apart[places] = x
            x, stride = apart, (1,) * len(stride)
        # (before, after) of the last dimension first, as F.pad takes them; negative numbers crop
        margins: list[int] = []
        for i in reversed(range(len(self.kernel))):
            reach = self.dilation[i] * (self.kernel[i] - 1)
            # from sizes, not from output_padding, which output_size of a transposed convolution's
            # forward overrides
            missing = (sizes[i] - 1) * stride[i] + reach + 1 - x.shape[2 + i]
            before = max(missing, 0) // 2 if self._before is None else self._before[i]
            before = reach - before if self.taps else before
            margins += [before, max(missing - before, 0)]
        x = F.pad(x, margins, mode=self._mode) if any(margins) else x
        image, channel, *pixel = x.stride()
        of_taps = (p * d for p, d in zip(pixel, self.dilation, strict=True))
        of_places = (p * s for p, s in zip(pixel, stride, strict=True))
        shape = x.shape[1], *self.kernel, x.shape[0], *sizes
        windows = x.as_strided(shape, (channel, *of_taps, image, *of_places), x.storage_offset())
        return windows.flip(tuple(range(1, 1 + len(self.kernel)))) if self.taps else windows

    def _few(self, x: Tensor, sizes: torch.Size, most: int) -> Tensor:
        """Return ``most`` of the patches, ``(C_in, taps, most)``, without forming the others."""
        key = (x.shape, sizes, most, x.device)
        if self._latest[:1] != (key,):
            size = math.prod(sizes)
            rows: Any = standing_for_all(len(x) * size, most, x.device)
            # patches of an image of pixel numbers tell which pixels patches consist of; padding is
            # pixel -1
            numbers = widened(torch.arange(1, x[0, 0].numel() + 1, device=x.device))
            numbers = self._windows(numbers.view(1, 1, *x.shape[2:]), sizes).reshape(-1, size)
            pixel = numbers.long().to(x.device)[:, rows % size].T - 1
            outside = (pixel < 0)[..., None]
            mask = outside if bool(outside.any()) else None
            self._latest = key, (rows // size)[:, None], pixel.clamp_(min=0), mask
        _, image, pixel, outside = self._latest
        pixels = x.flatten(2).movedim(1, -1)
        if pixels.is_contiguous():  # channels_last: the channels of a pixel are copied together
            flat = (image * pixels.shape[1] + pixel).flatten()
            patches = pixels.flatten(0, 1).index_select(0, flat).view(*pixel.shape, -1)
        else:
            patches = pixels[image, pixel]
        if outside is not None:
            patches.masked_fill_(outside, 0)
        return patches.permute(2, 1, 0)


@lru_cache(maxsize=256)
def standing_for_all(rows: int, most: int | None, device: torch.device) -> Tensor | None:
    """Return the indices of ``most`` of some rows, evenly drawn; None where all are taken.

    Each lies in a span of its own, at a place that is drawn anew for each span, so the indices have
    no period in common with the rows (positions in a sequence, columns of an image). They
    depend only on the two numbers.
    """
    if most is None or rows <= most:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    # a span is 2¹⁶ long, in integers, which are exact
    places = torch.randint(1 << 16, (most,), generator=generator, device="cpu")
    indices = ((torch.arange(most, device="cpu") << 16) + places) * rows // (most << 16)
    return to_device(indices.tolist(), device, torch.int64)
