"""Fused experts: E linear layers in one 3-d weight, each of which sees the rows that a router sends it.

    weight (E, out, in), or (E, in, out)        expert e: A_e and G_e of its own R_e rows, T_e = R_e / N

How many rows an expert has differs from step to step and from expert to expert, so there is no one T. What is kept are
``√T_e · A_e`` and ``√T_e · G_e``, for which T is 1: their Kronecker product is ``T_e · (A_e ⊗ G_e)``, and with ``√λ``
on their diagonals they are ``√T_e`` times the damped factors, so that what is solved is exactly that of E layers.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.kinds.base import shares_memory


class ExpertsKind:
    """The experts of one 3-d weight.

    Args:
        weight: ``(E, out, in)``, or ``(E, in, out)`` where ``inputs_first``.
        inputs_first: how an expert's matrix lies in memory.
    """

    label = "Experts"
    diagonal_input = False
    solves_biases = True
    routed = True

    def __init__(self, weight: Tensor, *, inputs_first: bool) -> None:
        self.transposed = inputs_first
        self.groups = weight.shape[0]
        self.outputs, self.inputs = weight.shape[:0:-1] if inputs_first else weight.shape[1:]

    def loss_terms(self, x: Tensor) -> int:
        """Return 1: how many rows are sent to an expert says nothing of the loss.

        Args:
            x: not used.

        Returns:
            1.
        """
        return 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return no dimensions: a row has left its place in the sequence.

        Args:
            x: the input.

        Returns:
            ``()``.
        """
        return torch.Size()

    def add_inputs_(
        self, a: BlockDiagonal, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int | list[int]:
        """Add the input's rows, as many for each expert.

        Args:
            a: the input factors, changed in place.
            x: ``(E, rows, in)``.
            output: not used.
            keep: not used.
            most: not used: every row counts, since T is in the factors.

        Returns:
            The number of rows of each expert.
        """
        a.add_second_moment_(x.to(a.blocks.dtype).mT)
        return [x.shape[1]] * self.groups

    def add_outputs_(self, g: BlockDiagonal, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the rows of the output's gradient, as many for each expert.

        Args:
            g: the output factors, changed in place.
            x: not used.
            grad: ``(E, rows, out)``.
            keep: not used.
        """
        g.add_second_moment_(grad.to(g.blocks.dtype).mT)

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as a batch of matrices.

        Args:
            tensor: ``(E, rows, columns)``.

        Returns:
            The same, contiguous.
        """
        return tensor.contiguous()

    def from_matrix_(self, matrix: Tensor, tensor: Tensor) -> None:
        """Write matrices back.

        Args:
            matrix: what :meth:`to_matrix` gave, changed.
            tensor: what it was given.
        """
        if not shares_memory(matrix, tensor):
            tensor.copy_(matrix)


class ExpertsCall(ExpertsKind):
    """One call of some experts.

    Args:
        kind: the experts.
        which: whose the rows are: one expert's, an index; ``(rows,)``, the expert of each row, in any order; or, where
            rows are in the order of their experts, how many each has; None: ``x`` is ``(E, rows, in)``.
        columns: whether input and output have their features in the dimension before the last.
    """

    def __init__(self, kind: ExpertsKind, which: int | Tensor | Sequence[int] | None, *, columns: bool = False) -> None:
        self.transposed, self.groups = kind.transposed, kind.groups
        self.inputs, self.outputs = kind.inputs, kind.outputs
        self._which = which
        self._columns = columns

    def add_inputs_(
        self, a: BlockDiagonal, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int | list[int]:
        """Add the input's rows.

        Args:
            a: the input factors, changed in place.
            x: ``(rows, ..., in)``; what lies beyond the experts' last row is no row.
            output: not used.
            keep: not used.
            most: not used.

        Returns:
            The number of rows of each expert.
        """
        x = self._rows_first(x)
        if self._which is None:
            return super().add_inputs_(a, x.expand(self.groups, -1, -1), output, keep)
        return self._add_(a, x, self.inputs)

    def add_outputs_(self, g: BlockDiagonal, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the rows of the output's gradient.

        Args:
            g: the output factors, changed in place.
            x: not used.
            grad: ``(rows, ..., out)``.
            keep: not used.
        """
        grad = self._rows_first(grad)
        if self._which is None:
            super().add_outputs_(g, x, grad, keep)
        else:
            self._add_(g, grad, self.outputs)

    def _rows_first(self, tensor: Tensor) -> Tensor:
        return tensor.mT if self._columns else tensor

    def _add_(self, factor: BlockDiagonal, rows: Tensor, features: int) -> list[int]:
        """Add to each expert's factor its own rows of ``(rows, ..., features)``; return how many each has."""
        which = self._which
        if isinstance(which, int):
            rows = rows.reshape(-1, features)
            counts = [len(rows) if expert == which else 0 for expert in range(self.groups)]
        elif isinstance(which, Tensor):
            rows = rows[which.argsort(stable=True)]
            counts = torch.bincount(which, minlength=self.groups).tolist()
        else:
            assert which is not None
            counts = list(which)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                own = rows[start : start + count].reshape(1, -1, features).to(factor.blocks.dtype)
                factor.group(expert).add_second_moment_(own.mT)
            start += count
        inner = math.prod(rows.shape[1:-1])
        return [count * inner for count in counts]


def fused_experts(module: nn.Module) -> dict[str, ExpertsKind]:
    """Find the weights of a module that hold one matrix an expert.

    They are told by what the module says of itself: 3-d parameters of a module that is called experts, or that has an
    attribute of that name with their number; so a position embedding ``(1, L, d)`` is none.

    Args:
        module: any module.

    Returns:
        Their geometry, by the name of the parameter.
    """
    counts = {
        value
        for name, value in vars(module).items()
        if "expert" in name.lower() and isinstance(value, int) and not isinstance(value, bool)
    }
    weights = {
        name: p
        for name, p in module.named_parameters(recurse=False)
        if p.dim() == 3
        and len(p) > 1
        and min(p.shape) > 0
        and ("expert" in type(module).__name__.lower() or len(p) in counts)
    }
    first = _inputs_come_first(module, weights)
    return {name: ExpertsKind(p, inputs_first=first) for name, p in weights.items()}


def _inputs_come_first(module: nn.Module, weights: dict[str, nn.Parameter]) -> bool:
    """Return how the matrices lie: ``x @ W_e`` is with inputs first, ``F.linear(x, W_e)`` with outputs first.

    Args:
        module: the experts.
        weights: theirs, by name.

    Returns:
        What the module says (``is_transposed``, as transformers has it); else what the shapes of a gated pair say;
        else False, as ``nn.Linear`` has it.
    """
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool):
        return said
    up, down = weights.get("gate_up_proj"), weights.get("down_proj")
    if up is None or down is None:
        return False
    # (E, hidden, 2 inner) beside (E, inner, hidden)
    return up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1]
