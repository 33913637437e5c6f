"""Parameters that are matrices without factors: weights of layers without a kind, and free parameters of modules.

The scale-free step orthogonalises them like every other matrix, but without preconditioning.
"""

import math

from torch import Tensor, nn

from torch_thor.curvature.kinds.base import shares_memory

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_TABLES = (nn.Embedding, nn.EmbeddingBag)


class PlainMatrix:
    """A parameter as ``groups`` matrices of ``outputs`` rows and ``inputs`` columns.

    Args:
        groups: the number of matrices.
        outputs: the number of rows of each.
        inputs: the number of columns of each.
        taps: the number of taps of a transposed convolution, whose two channel dimensions are swapped; 0 otherwise.
    """

    transposed = False

    def __init__(self, groups: int, outputs: int, inputs: int, taps: int = 0) -> None:
        self.groups = groups
        self.outputs = outputs
        self.inputs = inputs
        self._taps = taps

    def of_rows(self, shape: tuple[int, ...], rows: int) -> "PlainMatrix | None":
        """Return the matrices of some rows of the parameter, which one process holds.

        Args:
            shape: the shape of the whole parameter.
            rows: the size of the first dimension of the part.

        Returns:
            Whole matrices if the first dimension numbers them, else rows of one matrix, or columns for a transposed
            convolution; None if the matrix is one of several that share the first dimension (a grouped convolution).
        """
        if rows == shape[0]:
            return self
        if self.groups == shape[0]:
            return PlainMatrix(rows, self.outputs, self.inputs)
        if self.groups > 1:
            return None
        if self._taps:
            return PlainMatrix(1, self.outputs, rows * self._taps, self._taps)
        return PlainMatrix(1, rows, self.inputs)

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as matrices.

        Args:
            tensor: of the parameter's shape.

        Returns:
            ``(groups, outputs, inputs)``, a view where the layout of the tensor allows.
        """
        if not self._taps:
            return tensor.reshape(self.groups, self.outputs, self.inputs)
        by_group = tensor.reshape(self.groups, -1, self.outputs, self._taps)
        return by_group.transpose(1, 2).reshape(self.groups, self.outputs, self.inputs)

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Copy changed matrices back into the tensor that they were made of.

        Args:
            matrix: a result of :meth:`to_matrix`, whose values have changed.
            tensor: the tensor that was passed to it; changed in place where the matrix is not a view of it.
        """
        if shares_memory(matrix, tensor):
            return
        if self._taps:
            matrix = matrix.reshape(self.groups, self.outputs, -1, self._taps).transpose(1, 2)
        tensor.copy_(matrix.reshape(tensor.shape))


def matrix_of(module: nn.Module, attribute: str, parameter: Tensor) -> PlainMatrix | None:
    """Return a parameter as matrices.

    The weight of a convolution is ``weight.flatten(1)``, one matrix per group. A parameter of two dimensions is a
    matrix. Of three dimensions the last two are, as in the weights of experts and in position embeddings ``(1, L, D)``.
    Of more, all but the first are columns.

    Args:
        module: the module that owns the parameter.
        attribute: the parameter's name in it.
        parameter: the parameter.

    Returns:
        The matrices; None for a parameter that is not a matrix: a vector, whatever its shape, or the table of an
        embedding, whose rows are looked up one by one.
    """
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
