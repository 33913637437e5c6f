"""The geometry of a weight: which matrices it is, and how a tensor of its shape becomes them.

A kind of layer has a geometry (:mod:`torch_thor.curvature.kinds`), as has a weight without factors.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Geometry:
    """``groups`` independent matrices of ``outputs`` rows and ``inputs`` columns.

    They follow each other in the memory of the weight, but for those of a transposed convolution.
    """

    groups: int
    outputs: int
    inputs: int
    transposed: bool = False  # whether the weight has the inputs first
    taps: int = 0  # of a transposed convolution, whose weight is (in, out, taps)
    converter: Any = None  # a registered kind that permutes or copies the weight by itself

    @property
    def is_view(self) -> bool:
        """Whether matrices are their tensor in another shape."""
        in_order = not self.taps or 1 in (self.outputs, self.inputs // self.taps)
        return in_order and self.converter is None

    def is_by_rows(self, shape: tuple[int, ...]) -> bool:
        """Return whether the rows of a weight of this shape are rows of the matrix, or more."""
        columns = self.outputs if self.transposed else self.inputs
        return self.is_view and self.groups == 1 and columns == math.prod(shape[1:])

    def with_rows(self, rows: int) -> "Geometry":
        """Return the matrix of some rows of a weight whose rows are those of the matrix."""
        if self.transposed:
            return Geometry(1, self.outputs, rows, transposed=True)
        return Geometry(1, rows, self.inputs)

    def with_outputs(self, outputs: int) -> "Geometry":
        """Return the same matrices with other outputs, as of one of several projections."""
        return Geometry(self.groups, outputs, self.inputs, self.transposed, self.taps)

    def of_rows(self, count: int, rows: int) -> "Geometry | None":
        """Return the matrices of some of the ``count`` rows of a weight; None if they are none."""
        if rows == count:
            return self
        if self.groups == count:
            return replace(self, groups=rows)
        if self.groups > 1:
            return None
        return replace(self, inputs=rows * self.taps) if self.taps else self.with_rows(rows)

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as matrices, one for each group.

        Their shape is ``(groups, outputs, inputs)``, or ``(groups, inputs, outputs)`` if the weight
        has the inputs first.
        """
        if self.converter is not None:
            return self.converter.to_matrix(tensor)  # type: ignore[no-any-return]
        if self.taps:
            by_group = tensor.reshape(self.groups, -1, self.outputs, self.taps)
            return by_group.transpose(1, 2).reshape(self.groups, self.outputs, self.inputs)
        if self.transposed:
            return tensor.reshape(self.groups, self.inputs, self.outputs)
        return tensor.reshape(self.groups, self.outputs, self.inputs)

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Copy changed matrices back into their tensor, unless they are a view of it."""
        if self.converter is not None:
            self.converter.from_matrix_(matrix, tensor)
        elif not (
            # the address does not tell: tensors without memory of their own all have 0
            matrix._is_view() and matrix.data_ptr() == tensor.data_ptr()
        ):
            if self.taps:
                matrix = matrix.reshape(self.groups, self.outputs, -1, self.taps).transpose(1, 2)
            tensor.copy_(matrix.reshape(tensor.shape))

    def write_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Write these matrices into a tensor of the weight's shape."""
        target = self.to_matrix(tensor)
        target.copy_(matrix)
        self.from_matrix_(target, tensor)


def matrix_of(module: nn.Module, attribute: str, parameter: Tensor) -> Geometry | None:
    """Return the geometry of a parameter without a kind; None if it is no matrix."""
    shape = tuple(parameter.shape)
    if (
        len(shape) < 2
        or isinstance(module, nn.Embedding | nn.EmbeddingBag)
        or not parameter.is_floating_point()
    ):
        return None
    if attribute == "weight" and isinstance(module, nn.modules.conv._ConvNd):
        groups, taps = module.groups, math.prod(shape[2:])
        if module.transposed:
            geometry = Geometry(groups, shape[1], shape[0] // groups * taps, taps=taps)
        else:
            geometry = Geometry(groups, shape[0] // groups, shape[1] * taps)
    elif len(shape) == 3:
        geometry = Geometry(*shape)
    else:
        geometry = Geometry(1, shape[0], math.prod(shape[1:]))
    return geometry if min(geometry.outputs, geometry.inputs) > 1 else None
