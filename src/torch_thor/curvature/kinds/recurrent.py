"""The projections of recurrent layers: of the input, of the hidden state, and of the output where there is one.

Each weight ``weight_ih_l0``, ``weight_hh_l0_reverse``, ``weight_hr_l0``, ... is a linear layer whose rows are those of
every sequence and time step: T is the length of the sequences. Its outputs are all gates together. The weight is the
same at every step, so the rows of ``weight_hh`` are as dependent as those of a convolution's patches are, and are
treated as those are.
"""

import torch
from torch import Tensor

from torch_thor.curvature.kinds.linear import LinearKind


class RecurrentKind(LinearKind):
    """One projection of a recurrent layer.

    Args:
        weight: the projection's weight, ``(out, in)``.
        label: the class of the layer.
    """

    def __init__(self, weight: Tensor, label: str) -> None:
        self.outputs, self.inputs = weight.shape
        self.label = label


class RecurrentCall(RecurrentKind):
    """One call of it.

    Args:
        kind: the projection.
        batch: the number of sequences.
        packed: whether rows are those of a packed sequence, which have left their places.
    """

    def __init__(self, kind: RecurrentKind, batch: int, *, packed: bool) -> None:
        self.outputs, self.inputs, self.label = kind.outputs, kind.inputs, kind.label
        self._batch = batch
        self._packed = packed

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of sequences.

        Args:
            x: not used.

        Returns:
            That number.
        """
        return self._batch

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the leading dimensions; none for a packed sequence.

        Args:
            x: ``(N, L, features)``, ``(N, features)``, or packed rows.

        Returns:
            ``(N, L)`` or ``(N,)``, or ``()``.
        """
        return torch.Size() if self._packed else x.shape[:-1]
