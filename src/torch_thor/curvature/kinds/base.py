"""What every kind of layer answers: its geometry, its rows, and the way between the weight's memory and a matrix.

Each kind turns a layer's input into the paper's rows ``a`` and the gradient of its output into rows ``g``. Samples are
``(groups, features, rows)``, features first (see :mod:`torch_thor.curvature.blocks`).
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal


class Kind(Protocol):
    """A layer's geometry: ``groups`` independent ``(outputs, inputs)`` matrices.

    ``label`` names the kind in :meth:`THOR.coverage`. ``diagonal_input`` says that A is diagonal, whatever the split.
    ``transposed`` says that :meth:`to_matrix` gives ``(groups, inputs, outputs)``: the weight lies so in memory.
    ``solves_biases`` says that G is the second moment of the output's own gradient, which is also the bias's.
    ``routed`` says that each group has rows of its own, some none: T is then in the factors.
    """

    @property
    def label(self) -> str:
        """The kind's name for people."""
        ...

    @property
    def groups(self) -> int:
        """Independent (A, G) pairs."""
        ...

    @property
    def inputs(self) -> int:
        """Rows of A."""
        ...

    @property
    def outputs(self) -> int:
        """Rows of G."""
        ...

    @property
    def diagonal_input(self) -> bool:
        """Whether A is diagonal."""
        ...

    @property
    def transposed(self) -> bool:
        """Whether inputs come before outputs in the weight's memory."""
        ...

    @property
    def solves_biases(self) -> bool:
        """Whether biases are solved with G."""
        ...

    @property
    def routed(self) -> bool:
        """Whether each group has rows of its own: experts, and no convolution."""
        ...

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of the layer's input, 1 if it is not batched."""
        ...

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the leading dimensions of the input, whose every index is a row; none where rows are patches."""
        ...

    def add_inputs_(
        self, a: BlockDiagonal, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int | list[int]:
        """Add ``Σ a aᵀ`` of one call to the input factor.

        Args:
            a: the input factor, changed in place.
            x: the layer's input.
            output: the shape of its output.
            keep: ``bool``, of the leading dimensions of ``x``: which rows count; None for all. A kind without such
                rows (a convolution) takes all.
            most: how many rows are enough, evenly spread (:func:`spacing`); None for all.

        Returns:
            The number of rows; that of each group, where they have rows of their own.
        """
        ...

    def add_outputs_(self, g: BlockDiagonal, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add ``Σ g gᵀ`` of one call to the output factor.

        Args:
            g: the output factor, changed in place.
            x: the layer's input.
            grad: the gradient of the loss with respect to its output.
            keep: as for :meth:`add_inputs_`.
        """
        ...

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as a batch of matrices, a view where memory allows."""
        ...

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Write back what :meth:`to_matrix` gave; nothing to do where it gave a view."""
        ...


class MatrixWeight:
    """The weight is one matrix, as it lies in memory."""

    solves_biases = True
    routed = False

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as a batch of one matrix.

        Args:
            tensor: ``(rows, columns)``.

        Returns:
            ``(1, rows, columns)``.
        """
        return tensor.contiguous()[None]

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Write a matrix back.

        Args:
            matrix: what :meth:`to_matrix` gave, changed.
            tensor: what it was given.
        """
        if not shares_memory(matrix, tensor):
            tensor.copy_(matrix[0])


def spacing(rows: int, most: int | None, period: int = 1) -> int:
    """Return which rows are enough: every so many of them.

    Args:
        rows: how many there are.
        most: how many are enough; None for all.
        period: rows of one sample (tokens, pixels); the spacing shares no factor with it, so that all places in a
            sample have their turn.

    Returns:
        The spacing, 1 for all rows; at least ``most`` are left.
    """
    step = 1 if most is None else max(1, rows // max(most, 1))
    while math.gcd(step, period) > 1:
        step -= 1
    return step


def shares_memory(matrix: Tensor, tensor: Tensor) -> bool:
    """Return whether a matrix is a view of a tensor.

    Args:
        matrix: what :meth:`Kind.to_matrix` gave.
        tensor: what it was given.

    Returns:
        Whether they share memory.
    """
    return matrix.data_ptr() == tensor.data_ptr()
