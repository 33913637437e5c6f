"""The curvature of one layer: its factors, their inverses and its counters.

Factors, inverses and counters are stored in the optimizer's state of the weight, as tensors and numbers only, so a
checkpoint of the optimizer contains them. :mod:`torch_thor.curvature.layer_state` creates these entries and checks
whether they are complete. The update rules multiply gradients with the inverses. New statistics
(:class:`torch_thor.curvature.statistics.Statistics`) exist until the end of the step and are not part of the state.
"""

import copy
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.experts import group_rows_per_term, plain_where_unknown, weight_
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.owned_blocks import OwnedBlocks
from torch_thor.curvature.parameter_view import ParameterView, State
from torch_thor.curvature.row_shards import RowShards
from torch_thor.curvature.statistics import Factors, Statistics, Sums
from torch_thor.curvature.stored_factors import StoredFactors

SIDES = ("A", "G")

# The stored trace change before the first one. It must be a number, and NaN would not compare equal to itself.
NO_CHANGE_YET = -1.0


class LayerCurvature:
    """The Kronecker-factored curvature of one layer, Fisher block ≈ T · (A ⊗ G) (Chen et al. 2021, section 3.1)."""

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
        self.prefix = prefix
        self.sides = sides
        self.stored = StoredFactors(kind, weight, prefix, sides)
        self.layouts = self.stored.layouts
        self.inverse = self.stored.inverse
        self._geometry: tuple[RowShards, Kind] | None = None  # a cache
        self.statistics = Statistics(kind, weight, self.layouts)  # those of the current step

    # ---- for users ----------------------------------------------------------------------------------------------

    def factors(self) -> tuple[Tensor | list[Tensor] | None, ...]:
        """Return the factors in use as dense matrices, with zeros outside of the blocks if they are split.

        Returns:
            ``(A, G)``, of shapes ``(d_in, d_in)`` and ``(d_out, d_out)``, where ``d_in`` is the size of a patch for a
            convolution; for a grouped convolution two lists with one matrix per group. G is None for the scale-free
            step, which has A alone.

        Raises:
            RuntimeError: the layer has no factors yet.
        """
        return tuple(self._dense(key) if key in self.sides else None for key in SIDES)

    def inverses(self) -> tuple[Tensor | list[Tensor] | None, ...]:
        """Return the damped inverses in use, ``(A + √(λ/T) I)⁻¹`` and ``(G + √(λ/T) I)⁻¹``, as dense matrices.

        For the scale-free step they are ``(A + λ tr(A)/d_in I)⁻¹`` and None.

        Returns:
            Two matrices or lists, in the shapes of :meth:`factors`.

        Raises:
            RuntimeError: the layer has no factors yet.
        """
        return tuple(self._dense(f"{key}_inverse") if key in self.sides else None for key in SIDES)

    @property
    def refreshes(self) -> int:
        """The number of times that new factors were taken and inverted."""
        entries = self.weight_view.entries
        return 0 if entries is None else int(entries.get(self.prefix + "refreshes", 0))

    @property
    def stopped(self) -> bool:
        """Whether the trace rule has stopped this layer, so that it takes no new factors any more."""
        return bool(self.state.get(self.prefix + "stopped", 0))

    @property
    def last_trace_change(self) -> float | None:
        """Δ of the latest refresh with factors to compare with; None before there was one."""
        change = float(self.state.get(self.prefix + "last_trace_change", NO_CHANGE_YET))
        return None if change == NO_CHANGE_YET else change

    @property
    def rows_per_term(self) -> float:
        """T = R / N of the factors in use; 0 if there are none."""
        entries = self.weight_view.entries
        return 0.0 if entries is None else float(entries.get(self.prefix + "rows_per_term", 0.0))

    def __repr__(self) -> str:
        return (
            f"LayerCurvature({self.name!r}, {self.kind.label}, groups={self.kind.groups}, d_in={self.kind.inputs}, "
            f"d_out={self.kind.outputs}, refreshes={self.refreshes}, stopped={self.stopped}, "
            f"last_trace_change={self.last_trace_change})"
        )

    @property
    def geometry(self) -> Kind:
        """The kind for those rows of the weight that this process holds; the layer's own if it holds all of them."""
        shards = self.weight_view.shards
        if shards is None:
            return self.kind
        if self._geometry is None or self._geometry[0] is not shards:
            own = shards.own_of(self.weight_view.rows)
            kind = copy.copy(self.kind)
            setattr(kind, "inputs" if kind.transposed else "outputs", own.stop - own.start)
            self._geometry = shards, kind
        return self._geometry[1]

    # ---- state --------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> nn.Parameter:
        """The parameter that the module holds now; raises RuntimeError if the module computes it."""
        view = self.weight_view
        weight = view.module._parameters.get(view.attribute)
        return view.parameter if weight is None else weight

    @property
    def state(self) -> State:
        """The mapping that holds factors, inverses and counters; empty before the first step."""
        return self.weight_view.state

    @property
    def due(self) -> bool:
        """Whether the next step with statistics applies the trace rule to this layer."""
        return bool(self.state.get(self.prefix + "due", 1))

    @property
    def idle(self) -> bool:
        """Whether it was due on a step in which the loss did not reach it, and has not been reached since."""
        return bool(self.state.get(self.prefix + "idle", 0))

    @property
    def uncalled(self) -> bool:
        """Whether its weight is used without calling its module: it had a gradient but no statistics on a refresh."""
        return bool(self.state.get(self.prefix + "uncalled", 0))

    def record(
        self,
        change: float | None = None,
        *,
        stopped: bool | None = None,
        due: bool | None = None,
        idle: bool | None = None,
        uncalled: bool | None = None,
    ) -> None:
        """Write entries of the state; None leaves an entry as it is."""
        state, prefix = self.weight_view.entries, self.prefix
        if state is None:
            return
        if change is not None:
            state[prefix + "last_trace_change"] = change
        for key, flag in (("stopped", stopped), ("due", due), ("idle", idle), ("uncalled", uncalled)):
            if flag is not None:
                state[prefix + key] = int(flag)

    def _dense(self, key: str) -> Tensor | list[Tensor]:
        if not self.refreshes:
            raise RuntimeError(
                f"layer {self.name!r} has no factors yet: they are taken in the first optimizer.step() after a "
                f"backward pass through the layer"
            )
        _ = self.weight  # raises if the module computes the weight now, for which these factors do not hold
        matrices = self.stored.dense(key)
        return matrices if self.kind.groups > 1 else matrices[0]

    # ---- new factors --------------------------------------------------------------------------------------------

    def fresh_group_terms(self, terms: int) -> Tensor | None:
        """Return T of each group, if groups have their own rows. Must be called before :meth:`fresh_factors`."""
        if not self.kind.routed or "G" not in self.sides:
            return None
        return group_rows_per_term(self.statistics.group_rows, terms, self.state[self.prefix + "group_rows_per_term"])

    def groups_without_rows(self) -> list[bool]:
        """Return which groups keep the factors in use. Must be called before :meth:`fresh_factors`."""
        return [not rows for rows in self.statistics.group_rows] if self.refreshes else []

    def fresh_factors(self, terms: int = 1) -> Sums | None:
        """Return the factors of the rows of this step, and drop the rows."""
        if not self.kind.routed:
            return self.statistics.means()
        sums, group_rows = self.statistics.gathered(), self.statistics.group_rows
        self.statistics.forget()
        if sums is not None:  # weights whose groups have their own rows are not preconditioned in shards
            weight_(cast(Factors, sums), group_rows, terms if "G" in self.sides else None)
        return sums

    # ---- factors and inverses in use ----------------------------------------------------------------------------

    def set_factors(
        self,
        factors: Sequence[BlockDiagonal | OwnedBlocks],
        inverses: Sequence[BlockDiagonal | OwnedBlocks],
        rows_per_term: float,
        group_rows_per_term: Tensor | None = None,
        traces: Sequence[float] = (),
    ) -> None:
        """Store new factors and their inverses in the state."""
        state, prefix = self.weight_view.entries, self.prefix
        assert state is not None  # it has been created before the first refresh
        if group_rows_per_term is not None:
            state[prefix + "group_rows_per_term"] = group_rows_per_term
        if self.kind.routed:
            inverses = plain_where_unknown(traces, inverses)
        for side, factor, inverse in zip(self.sides, factors, inverses, strict=True):
            self.stored.write(side, factor)
            self.stored.write(f"{side}_inverse", inverse)
        state[prefix + "rows_per_term"] = rows_per_term
        state[prefix + "refreshes"] = self.refreshes + 1
