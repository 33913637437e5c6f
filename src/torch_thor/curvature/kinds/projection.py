"""A linear layer inside a composite module: a projection of an attention, a gate matrix of a recurrent layer.

The module computes it without calling a module for it. :mod:`torch_thor.capture.composites` makes its calls visible;
its rows are then those of an ordinary linear layer on a weight, or on rows of a fused weight.
"""

import torch
from torch import Tensor

from torch_thor.curvature.kinds.linear import LinearKind


class ProjectionKind(LinearKind):
    """A linear layer inside a composite module, which receives its inputs batch first, ``(N, ..., in)``."""

    batch_first = True

    def __init__(self, weight: Tensor, label: str) -> None:
        self.outputs, self.inputs = weight.shape
        self.label = label


class SequenceCall(ProjectionKind):
    """One call of a projection of a recurrent layer, whose rows are those of all sequences and time steps."""

    def __init__(self, kind: ProjectionKind, batch: int, *, packed: bool) -> None:
        self.outputs, self.inputs, self.label = kind.outputs, kind.inputs, kind.label
        self._batch = batch
        self._packed = packed

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of sequences."""
        return self._batch

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the leading dimensions of the input, none for a packed sequence."""
        return torch.Size() if self._packed else x.shape[:-1]
