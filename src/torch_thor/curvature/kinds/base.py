"""The interface of all kinds of layers.

A kind turns the input of a layer into the rows ``a`` of the paper, and the gradient of its output
into the rows ``g``. Samples are ``(groups, features, rows)``, features first (see
``torch_thor.curvature.blocks``).
"""

from typing import Protocol

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.geometry import Geometry


class Kind(Protocol):
    """The geometry of a layer: ``groups`` independent matrices, and their factors' rows.

    The shape of each matrix is ``(outputs, inputs)``.
    """

    label: str
    """The name of the kind in ``optimizer.coverage()``."""
    groups: int
    """The number of independent pairs (A, G): 1, or the groups of a convolution."""
    inputs: int
    """The number of rows of A, per group."""
    outputs: int
    """The number of rows of G, per group."""
    diagonal_input: bool
    """Whether A is diagonal, so that no split applies to it."""
    transposed: bool
    """Whether the weight has the inputs first.

    If so, ``to_matrix`` returns ``(groups, inputs, outputs)``.
    """
    solves_biases: bool
    """Whether biases are preconditioned with G.

    If so, G is the second moment of the gradient of the output itself.
    """
    has_own_rows: bool
    """Whether each group has its own rows, possibly none, as experts do.

    If so, T is part of the factors.
    """

    @property
    def geometry(self) -> Geometry:
        """These matrices as a value; a registered kind is given its ``to_matrix``'s."""
        ...

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of samples in an input.

        It is the leading dimension, or 1 if there is no batch dimension.
        """
        ...

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the leading dimensions of the input, each index of which is a row.

        There are none where rows are patches.
        """
        ...

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int | list[int]:
        """Add ``Σ a aᵀ`` of one call to the input factor.

        Args:
            a: the sum of the input factor, changed in place.
            x: the input of the layer.
            output: the shape of its output.
            keep: ``bool``, of shape ``row_shape``, False for rows to leave out; None to take all
                rows. A kind whose rows are patches takes all.
            most: a number of rows that may stand for all, with a weight such that the sum is that
                of all (``standing_for_all`` in matrix.py); None to take all.

        Returns:
            The number of rows of the call; one number per group if ``has_own_rows``.
        """
        ...

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add ``Σ g gᵀ`` of one call to the output factor.

        Args:
            g: the sum of the output factor, changed in place.
            x: the input of the layer.
            grad: the gradient of the loss with respect to its output, in the shape of the output.
            keep: as for ``add_inputs_``.
        """
        ...

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as matrices, one per group.

        The result is a view where the tensor's layout allows it.
        """
        ...

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Copy a changed result of ``to_matrix`` back into its tensor.

        There is nothing to do where it is a view.
        """
        ...
