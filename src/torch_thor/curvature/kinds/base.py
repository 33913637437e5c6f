"""The interface of all kinds of layers, and linear layers, which most kinds of other packages are derived from.

A kind turns the input of a layer into the rows ``a`` of the paper, and the gradient of its output into the rows ``g``.
Samples are ``(groups, features, rows)``, features first (see :mod:`torch_thor.curvature.blocks`).
"""

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks


class Kind(Protocol):
    """The geometry of a layer: ``groups`` independent matrices ``(outputs, inputs)``, and the rows of their factors."""

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
    """Whether the weight has the inputs first, so that :meth:`to_matrix` returns ``(groups, inputs, outputs)``."""
    solves_biases: bool
    """Whether biases are preconditioned with G: it is the second moment of the gradient of the output itself."""
    routed: bool
    """Whether each group has its own rows, possibly none, so that T is part of the factors (experts)."""
    batch_first: bool
    """Whether the leading dimension of the input is the batch for certain, as that of a convolution is.

    False for layers that also run on other layouts, such as a linear layer on ``(L, N, features)``. Where layers see
    different numbers of samples, those that are certain decide. A registered kind may leave the attribute out, which
    means False.
    """

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of samples in an input: its leading dimension, 1 if it has no batch dimension."""
        ...

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the leading dimensions of the input, each index of which is a row; none where rows are patches."""
        ...

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int | list[int]:
        """Add ``Σ a aᵀ`` of one call to the input factor.

        Args:
            a: the sum of the input factor, changed in place.
            x: the input of the layer.
            output: the shape of its output.
            keep: ``bool``, of shape :meth:`row_shape`, False for rows to leave out; None to take all rows. A kind whose
                rows are patches takes all.
            most: a number of evenly spread rows that is enough (:func:`spacing`); None for all.

        Returns:
            The number of rows that were added; one number per group if ``routed``.
        """
        ...

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add ``Σ g gᵀ`` of one call to the output factor.

        Args:
            g: the sum of the output factor, changed in place.
            x: the input of the layer.
            grad: the gradient of the loss with respect to its output, in the shape of the output.
            keep: as for :meth:`add_inputs_`.
        """
        ...

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as matrices, one per group, as a view where its layout allows."""
        ...

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Copy a changed result of :meth:`to_matrix` back into its tensor; nothing to do where it is a view."""
        ...


class MatrixWeight:
    """A base class for kinds whose weight has its matrices in their own memory layout, one after the other."""

    groups = 1
    inputs: int
    outputs: int
    diagonal_input = False
    transposed = False
    solves_biases = True
    routed = False
    batch_first = False
    taps = 0  # of a transposed convolution, whose weight is (in, out, taps)

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as matrices."""
        if self.taps:
            by_group = tensor.reshape(self.groups, -1, self.outputs, self.taps)
            return by_group.transpose(1, 2).reshape(self.groups, self.outputs, self.inputs)
        if self.transposed:
            return tensor.reshape(self.groups, self.inputs, self.outputs)
        return tensor.reshape(self.groups, self.outputs, self.inputs)

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Copy changed matrices back into the tensor that they were made of, unless they are a view of it."""
        if matrix.data_ptr() != tensor.data_ptr():
            if self.taps:
                matrix = matrix.reshape(self.groups, self.outputs, -1, self.taps).transpose(1, 2)
            tensor.copy_(matrix.reshape(tensor.shape))


class LinearKind(MatrixWeight):
    """``nn.Linear``: every leading index of the input is a row; a base class for layers that differ in the weight."""

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
        rows = rows[:: spacing(len(rows), most, math.prod(x.shape[1:-1]))]
        if len(rows):
            a.add_second_moment_(rows.to(a.rows.dtype).mT[None])
        return len(rows)

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the rows of the gradient of the output."""
        rows = grad.reshape(-1, self.outputs)
        rows = rows if keep is None else rows[keep.reshape(-1)]
        if len(rows):
            g.add_second_moment_(rows.to(g.rows.dtype).mT[None])


class TransposedLinearKind(LinearKind):
    """Hugging Face's ``Conv1D``, the linear layer of GPT-2, whose weight is ``(in, out)``."""

    label = "Conv1D"
    transposed = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inputs, self.outputs = self.outputs, self.inputs


class ProjectionKind(LinearKind):
    """A linear layer inside a composite module, which receives its inputs batch first, ``(N, ..., in)``.

    The module computes it without calling a module for it: a projection of an attention, a gate matrix of a recurrent
    layer (:mod:`torch_thor.capture.composites`). Its weight is a parameter, or rows of a fused one.

    Args:
        weight: the weight, ``(out, in)``, of which only the shape is used.
        label: the name of the kind in ``optimizer.coverage()``.
    """

    batch_first = True

    def __init__(self, weight: Tensor, label: str) -> None:
        self.outputs, self.inputs = weight.shape
        self.label = label


class PackedCall(ProjectionKind):
    """One call of a projection on packed sequences, whose rows are all their time steps, ``(rows, in)``."""

    def __init__(self, weight: Tensor, label: str, sequences: int) -> None:
        super().__init__(weight, label)
        self._sequences = sequences

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of sequences."""
        return self._sequences

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return no dimensions: a mask of padded sequences does not fit packed ones."""
        return torch.Size()


def spacing(rows: int, most: int | None, period: int = 1) -> int:
    """Return the distance between the rows to take, where some rows are enough for a factor."""
    step = 1 if most is None else max(1, rows // max(most, 1))
    while math.gcd(step, period) > 1:
        step -= 1
    return step
