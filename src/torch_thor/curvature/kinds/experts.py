"""Fused experts: E linear layers in one 3-d weight.

Each of them receives the rows that a router sends to it.

    weight (E, out, in), or (E, in, out)        expert e: A_e and G_e of its own R_e rows, T_e = R_e
    / N

The number of rows differs from step to step and from expert to expert, so there is no single T. The
stored factors are ``√T_e · A_e`` and ``√T_e · G_e``, for which T is 1: their Kronecker product is
``T_e · (A_e ⊗ G_e)``, and with ``√λ`` added to their diagonals they are ``√T_e`` times the damped
factors. The natural gradient therefore equals the natural gradient of E separate layers.
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.kinds.matrix import MatrixWeight


class ExpertsKind(MatrixWeight):
    """The kind of a 3-d weight that holds one matrix per expert."""

    label = "Experts"
    has_own_rows = True
    # of a call: one expert, each row's, or their row counts
    _which: int | Tensor | Sequence[int] | None = None
    _columns = False  # of a call: whether its rows are columns

    def __init__(self, weight: Tensor, *, inputs_first: bool) -> None:
        self.transposed = inputs_first
        self.groups = weight.shape[0]
        self.outputs, self.inputs = weight.shape[:0:-1] if inputs_first else weight.shape[1:]

    def of_call(
        self, which: int | Tensor | Sequence[int] | None, *, columns: bool = False
    ) -> "ExpertsKind":
        """Return the kind of one call of some experts.

        None stands for all of them, with the same number of rows each.
        """
        call = copy.copy(self)
        call._which, call._columns = which, columns
        return call

    def loss_terms(self, x: Tensor) -> int:
        """Return 1: how many rows reach an expert is independent of the number of loss terms."""
        return 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return no dimensions: behind a router, a row's place in its sequence is unknown."""
        return torch.Size()

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int | list[int]:
        """Add the rows of the input."""
        return self._add_(a, x, self.inputs)

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the rows of the gradient of the output."""
        self._add_(g, grad, self.outputs)

    def _add_(self, factor: Blocks, rows: Tensor, features: int) -> list[int]:
        """Add each expert's rows ``(rows, ..., features)`` to its factor; return their numbers."""
        which, rows = self._which, rows.mT if self._columns else rows
        if which is None:
            factor.add_second_moment_(rows.expand(self.groups, -1, -1).to(factor.rows.dtype).mT)
            return [rows.shape[-2]] * self.groups
        if isinstance(which, int):
            rows = rows.reshape(-1, features)
            counts = [len(rows) if expert == which else 0 for expert in range(self.groups)]
        elif isinstance(which, Tensor):
            rows = rows[which.argsort(stable=True)]
            counts = torch.bincount(which, minlength=self.groups).tolist()
        else:
            counts = list(which)
        inner = math.prod(rows.shape[1:-1])
        for expert, of_expert in enumerate(rows[: sum(counts)].split(counts)):
            if len(of_expert):
                samples = of_expert.reshape(1, -1, features).to(factor.rows.dtype).mT
                factor.group(expert).add_second_moment_(samples)
        return [count * inner for count in counts]
