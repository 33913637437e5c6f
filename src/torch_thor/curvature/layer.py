"""One preconditioned layer: its fresh statistics, its stale inverses, and the way between gradient and matrix.

Fresh statistics (sums over the rows of this step) belong to the object and die with the step; factors, inverses and
counters belong to the mapping that is handed in, as tensors and numbers only, so that whoever saves the mapping has
saved the layer.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import BlockDiagonal, BlockLayout, scale_
from torch_thor.curvature.experts import bias_scales, group_rows_per_term, plain_where_unknown, weighted_factors
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.parameter_view import ParameterView, State
from torch_thor.curvature.precision import factor_dtype, ieee_float32

Factors = tuple[BlockDiagonal, ...]  # one a side, in the order of LayerCurvature.sides

SIDES = ("A", "G")

_NO_CHANGE_YET = -1.0  # a number, because NaN never equals itself and None is no number to a checkpoint
# the state's numbers at first
_NUMBERS = {
    "rows_per_term": 0.0,
    "refreshes": 0,
    "stopped": 0,
    "due": 1,
    "idle": 0,
    "uncalled": 0,
    "last_trace_change": _NO_CHANGE_YET,
}
_LATER = ("idle", "uncalled")  # what earlier versions did not keep


class LayerCurvature:
    """The Kronecker-factored curvature of one layer, Fisher block ≈ T · (A ⊗ G) (Chen et al. 2021, section 3.1).

    Args:
        name: the module's name in the model.
        kind: its geometry.
        weight: the weight that is preconditioned.
        biases: the biases that are solved with its G.
        prefix: put before the keys of its state, where several layers share a weight.
        sides: which factors it has: ``("A", "G")``, or ``("A",)`` for the scale-free step.
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        weight: ParameterView,
        biases: Sequence[ParameterView],
        prefix: str = "",
        sides: tuple[str, ...] = SIDES,
    ) -> None:
        self.name = name
        self.kind = kind
        self.weight_view = weight
        self.biases = tuple(biases)
        self.rows = 0  # R of this step so far
        self.group_rows = [0] * kind.groups if kind.routed else []  # of each group, where they have rows of their own
        self._prefix = prefix
        self.sides = sides
        self._sums: Factors | None = None
        self._inverses: dict[str, BlockDiagonal] = {}  # as found in the state
        self._cut: tuple[int | None, dict[str, BlockLayout]] | None = None  # the layouts, and of which split dimension

    # ---- what users look at -------------------------------------------------------------------------------------

    def factors(self) -> tuple[Tensor | list[Tensor] | None, ...]:
        """Return A and G as last taken, dense, zeros between the blocks where split.

        Returns:
            ``(A, G)``, of shapes ``(d_in, d_in)`` and ``(d_out, d_out)`` with ``d_in`` a patch for a convolution; for
            a grouped convolution two lists, one entry a group. G is None for the scale-free step, which takes A alone.

        Raises:
            RuntimeError: nothing has been taken yet.
        """
        return tuple(self._dense(key) if key in self.sides else None for key in SIDES)

    def inverses(self) -> tuple[Tensor | list[Tensor] | None, ...]:
        """Return the damped inverses in use, ``(A + √(λ/T) I)⁻¹`` and ``(G + √(λ/T) I)⁻¹``, dense.

        For the scale-free step ``(A + λ tr(A)/d_in I)⁻¹`` and None.

        Returns:
            As :meth:`factors`.

        Raises:
            RuntimeError: nothing has been inverted yet.
        """
        return tuple(self._dense(f"{key}_inverse") if key in self.sides else None for key in SIDES)

    @property
    def refreshes(self) -> int:
        """How often new factors were taken and inverted."""
        entries = self.weight_view.entries
        return 0 if entries is None else int(entries.get(self._prefix + "refreshes", 0))

    @property
    def stopped(self) -> bool:
        """Whether the trace rule has stopped this layer for good."""
        return bool(self.state.get(self._prefix + "stopped", 0))

    @property
    def last_trace_change(self) -> float | None:
        """Δ of the latest refresh that had factors to compare with, or None."""
        change = float(self.state.get(self._prefix + "last_trace_change", _NO_CHANGE_YET))
        return None if change == _NO_CHANGE_YET else change

    @property
    def rows_per_term(self) -> float:
        """T = R / N of the factors in use; 0 before there are any."""
        entries = self.weight_view.entries
        return 0.0 if entries is None else float(entries.get(self._prefix + "rows_per_term", 0.0))

    def __repr__(self) -> str:
        return (
            f"LayerCurvature({self.name!r}, {self.kind.label}, groups={self.kind.groups}, d_in={self.kind.inputs}, "
            f"d_out={self.kind.outputs}, refreshes={self.refreshes}, stopped={self.stopped}, "
            f"last_trace_change={self.last_trace_change})"
        )

    # ---- state --------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> nn.Parameter:
        """The weight that is preconditioned."""
        return self.weight_view.parameter

    @property
    def state(self) -> State:
        """The mapping that holds factors, inverses and counters; empty before :meth:`materialise`."""
        return self.weight_view.state

    @property
    def due(self) -> bool:
        """Whether the next step with statistics has to decide on new factors."""
        return bool(self.state.get(self._prefix + "due", 1))

    @property
    def idle(self) -> bool:
        """Whether it was due for a whole step, not reached by the loss, and has not been since."""
        return bool(self.state.get(self._prefix + "idle", 0))

    @property
    def uncalled(self) -> bool:
        """Whether its weight got a gradient and the layer no statistics, while others had theirs: it is not called."""
        return bool(self.state.get(self._prefix + "uncalled", 0))

    def layouts(self) -> dict[str, BlockLayout]:
        """Return how its factors are cut.

        Returns:
            The layout of each side.
        """
        split = self.weight_view.split_dim
        if self._cut is not None and self._cut[0] == split:
            return self._cut[1]
        kind = self.kind
        both = {
            "A": BlockLayout.of(kind.groups, kind.inputs, 1 if kind.diagonal_input else split),
            "G": BlockLayout.of(kind.groups, kind.outputs, split),
        }
        self._cut = split, {key: both[key] for key in self.sides}
        return self._cut[1]

    def missing(self) -> list[str]:
        """Return the entries that a state with some of this layer's lacks.

        Returns:
            Their keys; none where the state has nothing of this layer yet, or all.
        """
        keys = list(_NUMBERS)
        for key, layout in self.layouts().items():
            for matrix in (key, f"{key}_inverse"):
                keys += [matrix, f"{matrix}_tail"] if layout.tail else [matrix]
        keys += ["group_rows_per_term"] if self.kind.routed else []
        absent = [self._prefix + key for key in keys if self._prefix + key not in self.state]
        later = {self._prefix + key for key in _LATER}  # made in the next step
        return [] if len(absent) == len(keys) else [key for key in absent if key not in later]

    def materialise(self) -> None:
        """Make every entry of the state, so that a checkpoint has the same keys and shapes at any time.

        A frozen weight has none until it is trained.
        """
        if self._prefix + _LATER[-1] in self.state:
            return
        if self._prefix + "refreshes" in self.state:  # of a version that did not keep all of it
            for key in _LATER:
                self.state.setdefault(self._prefix + key, _NUMBERS[key])
            return
        weight = self.weight
        if not weight.requires_grad:
            return
        state = self.state
        dtype = factor_dtype(weight.dtype)
        for key, layout in self.layouts().items():
            for matrix in (key, f"{key}_inverse"):
                self._store(matrix, BlockDiagonal.zeros(layout, dtype=dtype, device=weight.device))
        state.update({self._prefix + key: value for key, value in _NUMBERS.items()})
        if self.kind.routed:
            terms = torch.zeros(self.kind.groups, dtype=dtype, device=weight.device)
            state[self._prefix + "group_rows_per_term"] = terms

    def _store(self, key: str, matrix: BlockDiagonal) -> None:
        self.state[self._prefix + key] = matrix.blocks
        if matrix.tail is not None:
            self.state[f"{self._prefix}{key}_tail"] = matrix.tail

    def matrix(self, key: str) -> BlockDiagonal:
        """Return a stored block-diagonal matrix.

        Args:
            key: ``"A"``, ``"G"``, ``"A_inverse"`` or ``"G_inverse"``.

        Returns:
            The matrix; its tensors are those of the state.
        """
        return BlockDiagonal(self.layouts()[key[0]], *self.stored(key))

    def inverse(self, side: str) -> BlockDiagonal:
        """Return the damped inverse in use.

        Args:
            side: ``"A"`` or ``"G"``.

        Returns:
            The matrix; its tensors are those of the state.
        """
        entries, found = self.weight_view.entries, self._inverses.get(side)
        if found is None or entries is None or found.blocks is not entries.get(f"{self._prefix}{side}_inverse"):
            found = self._inverses[side] = self.matrix(f"{side}_inverse")
        return found

    def stored(self, key: str) -> tuple[Any, Any]:
        """Return the tensors of a stored matrix as they stand in the state, checked by nobody.

        Args:
            key: as for :meth:`matrix`.

        Returns:
            Blocks and tail; None where there are none.
        """
        return self.state.get(self._prefix + key), self.state.get(f"{self._prefix}{key}_tail")

    def record(
        self,
        change: float | None = None,
        *,
        stopped: bool | None = None,
        due: bool | None = None,
        idle: bool | None = None,
        uncalled: bool | None = None,
    ) -> None:
        """Keep what was found in the state; None leaves an entry as it is.

        Args:
            change: Δ.
            stopped: whether the layer stops for good.
            due: see :attr:`due`; like the next two it is :class:`torch_thor.capture.capture.Capture` that decides.
            idle: see :attr:`idle`.
            uncalled: see :attr:`uncalled`.
        """
        if change is not None:
            self.state[self._prefix + "last_trace_change"] = change
        for key, flag in (("stopped", stopped), ("due", due), ("idle", idle), ("uncalled", uncalled)):
            if flag is not None:
                self.state[self._prefix + key] = int(flag)

    def _dense(self, key: str) -> Tensor | list[Tensor]:
        if not self.refreshes:
            raise RuntimeError(
                f"layer {self.name!r} has no factors yet: they are taken in the first optimizer.step() after a "
                f"backward pass through the layer"
            )
        _ = self.weight  # raises where the module computes it now, and these are no longer the factors of anything
        matrices = self.matrix(key).dense()
        return matrices if self.kind.groups > 1 else matrices[0]

    # ---- fresh statistics ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(
        self, kind: Kind, x: Tensor, g: Tensor, keep: Tensor | None = None, instead_of: Tensor | None = None
    ) -> None:
        """Add the rows of one forward and backward pass through the layer.

        Args:
            kind: the geometry of the module that ran: where modules share the weight, each has its own.
            x: its input.
            g: the gradient of the loss with respect to its output, as autograd gives it.
            keep: which rows count, of the leading dimensions of ``x``; None for all.
            instead_of: the gradient that this call has given its rows with before, where another loss of the same
                forward pass has added to it; None for a call that is new.
        """
        if not x.numel() or not g.numel():  # an empty batch has no rows
            return
        x, g, (a_sum, g_sum) = x.detach(), g.detach(), self.sums()
        with ieee_float32(x.device.type):
            if instead_of is None:
                self._count(kind.add_inputs_(a_sum, x, g.shape, keep))
                kind.add_outputs_(g_sum, x, g, keep)
                return
            old = g_sum.with_parts([torch.zeros_like(p) for p in g_sum.parts()])
            kind.add_outputs_(old, x, instead_of, keep)
            kind.add_outputs_(g_sum, x, g, keep)
            for part, old_part in zip(g_sum.parts(), old.parts(), strict=True):
                part.sub_(old_part)

    @torch.no_grad()
    def gather_inputs(self, kind: Kind, x: Tensor, output: torch.Size, keep: Tensor | None, most: int) -> None:
        """Add the rows of one forward pass through the layer, for a layer that has A alone.

        Args:
            kind: the geometry of the module that ran.
            x: its input.
            output: the shape of its output.
            keep: which rows count, of the leading dimensions of ``x``; None for all.
            most: how many rows are enough.
        """
        if x.numel() and output.numel():
            (a_sum,) = self.sums()
            with ieee_float32(x.device.type):
                self._count(kind.add_inputs_(a_sum, x.detach(), output, keep, most))

    def _count(self, rows: int | list[int]) -> None:
        if isinstance(rows, list):
            self.group_rows = [n + more for n, more in zip(self.group_rows, rows, strict=True)]
            rows = sum(rows)
        self.rows += rows

    def sums(self) -> Factors:
        """Return ``Σ a aᵀ`` and ``Σ g gᵀ`` of this step so far; what is added to them counts.

        Returns:
            The sums, one a side, zeros before the first row.
        """
        if self._sums is None:
            weight = self.weight
            dtype = factor_dtype(weight.dtype)
            layouts = self.layouts().values()
            self._sums = tuple(BlockDiagonal.zeros(layout, dtype=dtype, device=weight.device) for layout in layouts)
        return self._sums

    def scale_outputs_(self, scale: float) -> None:
        """Turn the gathered output gradients into gradients of one loss term.

        Args:
            scale: what they are multiplied by (N for a mean).
        """
        if self._sums is not None and "G" in self.sides:
            for part in self._sums[1].parts():
                # in two factors, because scale² of a scaled half-precision loss can leave the range of float32
                part.mul_(scale).mul_(scale)

    def fresh_group_terms(self, terms: int) -> Tensor | None:
        """Return T of each group, where they have rows of their own; to be asked before :meth:`fresh_factors`.

        Args:
            terms: N.

        Returns:
            ``(groups,)``, or None where one T holds for all.
        """
        if not self.kind.routed or "G" not in self.sides:
            return None
        return group_rows_per_term(self.group_rows, terms, self.state[self._prefix + "group_rows_per_term"])

    def fresh_factors(self, terms: int = 1) -> Factors | None:
        """Return A and G of this step's rows and forget the rows.

        Groups that have rows of their own are weighted with ``√T``, and one that has none now keeps what it had.

        Args:
            terms: N.

        Returns:
            A and G, or A alone; None where no row came by.
        """
        sums, rows, group_rows = self._sums, self.rows, self.group_rows
        self.forget()
        if sums is None or not rows:
            return None
        if self.kind.routed:
            before = tuple(self.matrix(key) for key in self.sides) if self.refreshes else None
            return weighted_factors(sums, group_rows, terms if "G" in self.sides else None, before)
        for factor in sums:
            for part in factor.parts():
                part.div_(rows)
        return sums

    def has_gradient(self) -> bool:
        """Return whether the loss has reached the weight; zeros are what an unused one may have for a gradient.

        Returns:
            Whether its gradient holds anything (a wait for the device).
        """
        gradient = self.weight.grad
        if gradient is None:
            return False
        return bool((gradient._values() if gradient.is_sparse else self.weight_view.of(gradient)).any())

    def has_rows_with_gradient(self) -> bool:
        """Return whether some row of this step so far has a gradient that is not zero; of one without G, any row.

        Returns:
            Whether there is one (a wait for the device).
        """
        return self._sums is not None and any(bool(part.any()) for part in self._sums[-1].parts())

    def gathered(self) -> Factors | None:
        """Return the sums ``Σ a aᵀ`` and ``Σ g gᵀ`` of this step so far.

        Returns:
            The sums, or None where no row came by.
        """
        return self._sums if self.rows else None

    def cut_gathered(self) -> None:
        """Cut the sums of this step anew, after the split dimension has become smaller."""
        if self._sums is not None:
            layouts = self.layouts().values()
            self._sums = tuple(one.cut(layout.block) for one, layout in zip(self._sums, layouts, strict=True))

    def follow_weight(self) -> None:
        """Move the sums of this step to the weight's device and precision, where it was converted meanwhile."""
        if self._sums is not None:
            device, dtype = self.weight.device, factor_dtype(self.weight.dtype)
            self._sums = tuple(one.with_parts([part.to(device, dtype) for part in one.parts()]) for one in self._sums)

    def forget(self) -> None:
        """Drop the statistics of this step."""
        self._sums, self.rows = None, 0
        self.group_rows = [0] * len(self.group_rows)

    # ---- stale inverses -----------------------------------------------------------------------------------------

    def set_factors(
        self,
        factors: Factors,
        inverses: Factors,
        rows_per_term: float,
        group_rows_per_term: Tensor | None = None,
    ) -> None:
        """Put new factors and their inverses to use.

        Args:
            factors: one a side.
            inverses: their damped inverses.
            rows_per_term: T.
            group_rows_per_term: T of each group, where it is in their factors.
        """
        if group_rows_per_term is not None:
            self.state[self._prefix + "group_rows_per_term"] = group_rows_per_term
        if self.kind.routed:
            inverses = plain_where_unknown(factors, inverses)
        for key, factor, inverse in zip(self.sides, factors, inverses, strict=True):
            self._store(key, factor)
            self._store(f"{key}_inverse", inverse)
        self.state[self._prefix + "rows_per_term"] = rows_per_term
        self.state[self._prefix + "refreshes"] = self.refreshes + 1

    def precondition_inputs(self, gradient: Tensor, into: Tensor) -> None:
        """``into ← ∇W A_d⁻¹``, for a layer that has A alone; to be called inside ``ieee_float32`` and without autograd.

        Args:
            gradient: of the shape of the weight (of its rows that are this layer's).
            into: of the shape of :meth:`Kind.to_matrix`'s result, in the factors' dtype; overwritten.
        """
        matrix, inverse = self.kind.to_matrix(gradient).to(into.dtype), self.inverse("A")
        if self.kind.transposed:
            into.copy_(inverse.left_multiply(matrix))
        else:
            inverse.accumulate_right_product_(matrix, 1.0, into, 0.0)

    @torch.no_grad()
    def accumulate_natural_gradient_(self, gradient: Tensor, into: Tensor, decay: float, scale: float = 1.0) -> None:
        """``into ← decay * into + (scale/T) · G_d⁻¹ ∇W A_d⁻¹``: with the momentum and μ, the momentum's whole step.

        Args:
            gradient: of the shape of the weight (of its rows that are this layer's); an embedding's may be sparse.
            into: of the same shape, in the factors' dtype; changed in place.
            decay: a number; with 0 what stood in ``into`` does not matter.
            scale: what the gradient is multiplied by.
        """
        if gradient.is_sparse and self.kind.diagonal_input and gradient.sparse_dim() == 1:
            self._accumulate_rows_(gradient.coalesce(), into, decay, scale)
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        left, right = self.inverse("G"), self.inverse("A")
        if self.kind.transposed:
            left, right = right, left
        matrix, target = self.kind.to_matrix(gradient), self.kind.to_matrix(into)
        with ieee_float32(gradient.device.type):
            solved = left.left_multiply(matrix.to(left.blocks.dtype))
            right.accumulate_right_product_(solved, scale / self.rows_per_term, target, decay)
        self.kind.from_matrix_(target, into)

    def _accumulate_rows_(self, gradient: Tensor, into: Tensor, decay: float, scale: float) -> None:
        """Do the same for the sparse gradient of an embedding: tokens that were not there are not touched by it."""
        a_inverse, g_inverse = self.inverse("A"), self.inverse("G")
        tokens, rows = gradient.indices()[0], gradient.values().to(a_inverse.blocks.dtype)
        scaled = rows * a_inverse.blocks.view(-1)[tokens, None]
        solved = torch.zeros_like(scaled)
        with ieee_float32(gradient.device.type):
            g_inverse.accumulate_right_product_(scaled[None], scale / self.rows_per_term, solved[None], 0.0)
        scale_(into, decay).index_add_(0, tokens, solved)

    @torch.no_grad()
    def accumulate_natural_bias_gradient_(
        self, gradient: Tensor, into: Tensor, decay: float, scale: float = 1.0
    ) -> None:
        """``into ← decay * into + (scale/T) · G_d⁻¹ ∇b``: the bias sees the constant input 1, so its A is the number 1.

        Args:
            gradient: ``(d_out,)``.
            into: of the same shape, in the factors' dtype; changed in place.
            decay: a number; with 0 what stood in ``into`` does not matter.
            scale: what the gradient is multiplied by.
        """
        g_inverse = self.inverse("G")
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        column = gradient.to(g_inverse.blocks.dtype).reshape(self.kind.groups, self.kind.outputs, 1)
        with ieee_float32(gradient.device.type):
            solved = g_inverse.left_multiply(column)
        if self.kind.routed:
            solved *= bias_scales(self.state[self._prefix + "group_rows_per_term"])[:, None, None]
        scale_(into, decay).add_(solved.reshape(into.shape), alpha=scale / self.rows_per_term)

    def trace_of_fisher(self, factors: Sequence[Tensor], rows_per_term: float, damping: float) -> float:
        """Return tr(T · A ⊗ G + λI), summed over groups: of the same F that is damped (section 3.2).

        Args:
            factors: traces of A and of G (or of A alone: G counts as 1), ``(groups,)`` each, on the host.
            rows_per_term: T of these factors.
            damping: λ.

        Returns:
            The trace; NaN or inf if a factor holds one.
        """
        size = self.kind.groups * self.kind.inputs * self.kind.outputs
        products = torch.stack([factor.double() for factor in factors]).prod(0).tolist()
        return rows_per_term * math.fsum(products) + damping * size
