"""Matrices without factors: weights of layers without a kind, and free parameters of modules.

The scale-free step orthogonalises them like every other matrix, but without preconditioning.
"""

import math
import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from torch_thor.curvature.kinds.matrix import MatrixWeight


class PlainMatrix(MatrixWeight):
    """A parameter as ``groups`` matrices of ``outputs`` rows and ``inputs`` columns."""

    def __init__(
        self, groups: int, outputs: int, inputs: int, taps: int = 0, *, transposed: bool = False
    ) -> None:
        self.groups, self.outputs, self.inputs, self.taps, self.transposed = (
            groups,
            outputs,
            inputs,
            taps,
            transposed,
        )

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
    if (
        len(shape) < 2
        or isinstance(module, nn.Embedding | nn.EmbeddingBag)
        or not parameter.is_floating_point()
    ):
        return None
    if attribute == "weight" and isinstance(module, nn.modules.conv._ConvNd):
        groups, taps = module.groups, math.prod(shape[2:])
        if module.transposed:
            found = PlainMatrix(groups, shape[1], shape[0] // groups * taps, taps)
        else:
            found = PlainMatrix(groups, shape[0] // groups, shape[1] * taps)
    elif len(shape) == 3:
        found = PlainMatrix(*shape)
    else:
        found = PlainMatrix(1, shape[0], math.prod(shape[1:]))
    return found if min(found.outputs, found.inputs) > 1 else None


# the numbers of rows of the projections that a layer computes at once
PARTS: "weakref.WeakKeyDictionary[nn.Module, tuple[int, ...]]" = weakref.WeakKeyDictionary()


def split_rows(module: nn.Module, sizes: Sequence[int]) -> None:
    """Declare that a layer computes several projections at once.

    ThorMuon then orthogonalises them apart.

    ``split_rows(block.attn.c_attn, (768, 768, 768))`` for the query, key and value of a fused
    linear layer. Those of ``torch.nn.MultiheadAttention`` are known. It holds for optimizers that
    are made afterwards.

    Args:
        module: a layer whose weight is one matrix.
        sizes: the numbers of outputs of the projections, in their order.

    Raises:
        ValueError: the sizes are no positive whole numbers.
    """
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(
            f"sizes={sizes!r}: must be whole numbers ≥ 1, the outputs of each projection; give (d, "
            "d, d)"
        )
    PARTS[module] = tuple(sizes)
