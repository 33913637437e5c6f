"""Parameters that are matrices without factors: weights of layers without a kind, and free parameters of modules.

The scale-free step orthogonalises them like every other matrix, but without preconditioning.
"""

import math

from torch import Tensor, nn

from torch_thor.curvature.kinds.base import MatrixWeight

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_TABLES = (nn.Embedding, nn.EmbeddingBag)


class PlainMatrix(MatrixWeight):
    """A parameter as ``groups`` matrices of ``outputs`` rows and ``inputs`` columns."""

    def __init__(self, groups: int, outputs: int, inputs: int, taps: int = 0) -> None:
        self.groups = groups
        self.outputs = outputs
        self.inputs = inputs
        self.taps = taps

    def of_rows(self, shape: tuple[int, ...], rows: int) -> "PlainMatrix | None":
        """Return the matrices of some rows of the parameter, which one process holds."""
        if rows == shape[0]:
            return self
        if self.groups == shape[0]:
            return PlainMatrix(rows, self.outputs, self.inputs)
        if self.groups > 1:
            return None
        if self.taps:
            return PlainMatrix(1, self.outputs, rows * self.taps, self.taps)
        return PlainMatrix(1, rows, self.inputs)


def matrix_of(module: nn.Module, attribute: str, parameter: Tensor) -> PlainMatrix | None:
    """Return a parameter as matrices."""
    shape = tuple(parameter.shape)
    if len(shape) < 2 or isinstance(module, _TABLES) or not parameter.is_floating_point():
        return None
    if attribute == "weight" and isinstance(module, _TRANSPOSED):
        taps = math.prod(shape[2:])
        found = PlainMatrix(module.groups, shape[1], shape[0] // module.groups * taps, taps)
    elif attribute == "weight" and isinstance(module, _CONVOLUTIONS):
        found = PlainMatrix(module.groups, shape[0] // module.groups, math.prod(shape[1:]))
    elif len(shape) == 3:
        found = PlainMatrix(*shape)
    else:
        found = PlainMatrix(1, shape[0], math.prod(shape[1:]))
    return found if min(found.outputs, found.inputs) > 1 else None
