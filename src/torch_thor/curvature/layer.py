"""The curvature of one layer: its factors, their inverses and its counters.

They are stored in the optimizer's state of the weight, as tensors and numbers only, so a checkpoint
of the optimizer contains them. New statistics (:class:`Statistics`) exist until the end of the
step. If several layers are rows of one parameter, the keys of each have a prefix.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.blocks import (
    Blocks,
    factor_dtype,
    ieee_float32,
    to_device,
)
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layout import Layout, layout_of
from torch_thor.curvature.lifecycle import IDLE, Life
from torch_thor.curvature.view import ParameterView, State, local


@dataclass(frozen=True, eq=False)
class Factor:
    """``A`` or ``G`` of one layer, and its inverse, as they are bound to a state."""

    side: str
    view: ParameterView  # of the weight
    layout: Layout

    def make_zeros(self, dtype: torch.dtype, device: torch.device) -> None:
        """Add zeros for the tensors that the state lacks."""
        state, shape = self.view.state, self.layout.shape
        shards = self.view.shards if self.layout.by_rows else None
        for key in self.layout.keys:
            if key in state:
                continue
            if shards is None:
                state[key] = torch.zeros(shape, dtype=dtype, device=device)
            else:
                local_shape = (shards.local.stop - shards.local.start, shape[1])
                state[key] = shards.wrap(torch.zeros(local_shape, dtype=dtype, device=device))

    def read(self, *, inverse: bool = False) -> Blocks:
        """Return this process's blocks of the factor or of its inverse, as views of the state."""
        stored = self.view.state[self.layout.keys[inverse]]
        rows = stored if type(stored) is Tensor else local(stored)
        if self.layout.by_rows and self.view.local_rows is not None:
            rows = rows[self.view.local_rows]
        return Blocks(self.layout.local, rows)

    def dense(self, *, inverse: bool) -> list[Tensor]:
        """Return the matrix of each group, with zeros outside of the blocks.

        All processes that divide it must call this.
        """
        if self.layout.owners is None:
            return self.read(inverse=inverse).dense()
        stored: Any = self.view.state[self.layout.keys[inverse]]
        return Blocks(self.layout.block_sizes, self.view.of(stored.full_tensor())).dense()


class Statistics:
    """``Σ a aᵀ`` and ``Σ g gᵀ`` over the rows of the current step, and the number of rows."""

    def __init__(self, kind: Kind, factors: tuple[Factor, ...]) -> None:
        self._kind, self.factors = kind, factors
        self.forget()

    def forget(self) -> None:
        """Drop the statistics of this step."""
        # one for each factor, of the blocks of all processes
        self._sums: list[Blocks] | None = None
        self.rows = 0  # R of this step so far
        # R of each group, if groups have their own rows
        self.group_rows = [0] * self._kind.groups if self._kind.has_own_rows else []

    @torch.no_grad()
    def gather(
        self,
        kind: Kind,
        x: Tensor,
        output: Tensor | torch.Size,
        keep: Tensor | None = None,
        *,
        most: int | None = None,
        instead_of: Tensor | None = None,
    ) -> None:
        """Add the rows of one pass, or replace gradients that were added before.

        ``output``: its gradient, or its shape for a layer without G. ``most``: a number of
        rows that stand for all.
        """
        shape = output if isinstance(output, torch.Size) else output.shape
        if not x.numel() or not shape.numel():  # an empty batch has no rows
            return
        x, sums = x.detach(), self.sums()
        with ieee_float32(x.device.type):
            if not isinstance(output, torch.Size):
                kind.add_outputs_(sums[1], x, output.detach(), keep)
            if instead_of is not None:
                old = Blocks(sums[1].block_sizes, torch.zeros_like(sums[1].rows))
                kind.add_outputs_(old, x, instead_of, keep)
                sums[1].rows.sub_(old.rows)
                return
            rows = kind.add_inputs_(sums[0], x, shape, keep, most)
        counts = [rows] if isinstance(rows, int) else rows
        self.rows += sum(counts)
        self.group_rows = list(map(operator.add, self.group_rows, counts))

    @torch.no_grad()
    def add(self, other: "Statistics") -> None:
        """Add the rows that were gathered for the same layer elsewhere."""
        if other._sums is None:
            return
        for sums, more in zip(self.sums(), other._sums, strict=True):
            sums.rows.add_(more.rows)
        self.rows += other.rows
        self.group_rows = list(map(operator.add, self.group_rows, other.group_rows))

    def sums(self) -> list[Blocks]:
        """Return ``Σ a aᵀ`` and ``Σ g gᵀ`` of this step so far, to which rows can be added."""
        if self._sums is None:
            view = self.factors[0].view
            # FSDP2 may keep a parameter on the CPU and in another dtype than the dtype that it
            # computes with
            weight: Any = view.module._parameters.get(view.attribute)
            dtype = factor_dtype((weight if view.shards is None else view.parameter).dtype)
            self._sums = [
                Blocks(cut, torch.zeros(cut.rows, cut.width, dtype=dtype, device=weight.device))
                for cut in (factor.layout.block_sizes for factor in self.factors)
            ]
        return self._sums

    def scale_gradients_(self, scale: float) -> None:
        """Multiply the gradients of the rows so far by a number."""
        for g_sum in (self._sums or ())[1:]:
            # in two products, because scale² can overflow float32 if the loss is scaled for half
            # precision
            g_sum.rows.mul_(scale).mul_(scale)

    def take(self, loss_terms: int) -> list[Blocks] | None:
        """Return the factors of the rows of this step, and drop the rows; None if there are none.

        They are means. Of groups with their own rows they are ``√T_e A_e`` and ``√T_e G_e``
        (``torch_thor.curvature.kinds.experts``); without G, plain means.
        """
        sums, rows, group_rows = self._sums if self.rows else None, self.rows, self.group_rows
        self.forget()
        for factor in sums or ():
            if not group_rows:
                factor.rows.div_(rows)
                continue
            counts = to_device(group_rows, factor.rows.device, factor.rows.dtype)
            mean = counts.clamp(min=1).reciprocal()
            factor.scale_groups_(
                mean if len(self.factors) == 1 else (counts * loss_terms).clamp(min=1).rsqrt()
            )
        return sums


SIDES = ("A", "G")
# the key of the number of shards at whose boundaries the blocks of the rows end
SHARDS = "row_shards"

# The stored trace change before the first refresh. It must be a number, and NaN would not compare
# equal to itself.
_NO_CHANGE_YET = -1.0
# The numbers in the state, with their initial values. ``due``: the next step with statistics
# applies the trace rule; ``idle``: it was due on a step in which the loss did not reach it, and has
# not been reached since (1), or once (2); ``uncalled``: its weight is used without calling its
# module, so it had a gradient but no statistics on a refresh.
NUMBERS = {
    "rows_per_term": 0.0,
    "refreshes": 0,
    "stopped": 0,
    "due": 1,
    "idle": 0,
    "uncalled": 0,
    "last_trace_change": _NO_CHANGE_YET,
}


def _stored(key: str, doc: str, convert: Callable[[float], Any] = bool) -> Any:
    """Make a property of a number of the state; before there is a state, the initial number."""

    def read(layer: "LayerCurvature") -> Any:
        return convert(layer.weight_view.state.get(layer.prefix + key, NUMBERS[key]))

    return property(read, doc=doc)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that can be preconditioned.

    It is one or several modules that share a weight, or a part of a composite module.
    """

    name: str  # its name: its module's, or the composite module with its name inside that
    kind: Kind
    weight: ParameterView
    biases: list[ParameterView]
    # put before the names of its state, where several layers are rows of one parameter
    prefix: str = ""
    # the modules that compute it: torch_thor.capture.inspection.Use
    uses: Sequence[Any] = ()

    @property
    def views(self) -> tuple[ParameterView, ...]:
        """The parameters that are preconditioned, or the rows of them that belong to it."""
        return self.weight, *self.biases


def with_gradient(layers: Iterable["LayerCurvature"]) -> set["LayerCurvature"]:
    """Return the layers whose weights a loss has reached; the device is waited for once."""
    found = {
        layer: layer.weight.requires_grad and layer.weight_view.has_gradient() for layer in layers
    }
    asked = {layer: flag for layer, flag in found.items() if isinstance(flag, Tensor)}
    if asked:
        first, *_ = asked.values()
        flags = torch.stack([flag.to(first.device) for flag in asked.values()]).tolist()
        found.update(zip(asked, flags, strict=True))
    return {layer for layer, flag in found.items() if flag}


class LayerCurvature:
    """The Kronecker-factored curvature of one layer, Fisher block ≈ T · (A ⊗ G).

    See Chen et al. 2021, section 3.1.
    """

    def __init__(self, layer: Layer, factor_names: tuple[str, ...] = SIDES) -> None:
        self.layer, self.factor_names = layer, factor_names
        self.name, self.kind, self.prefix = layer.name, layer.kind, layer.prefix
        factors = self.laid_out(layer.weight)
        self.statistics = Statistics(layer.kind, factors)  # those of the current step
        self.bind(factors)

    def laid_out(self, weight: ParameterView) -> tuple[Factor, ...]:
        """Return the factors for a view of the weight."""
        return tuple(
            Factor(side, weight, layout_of(side, self.kind, weight, self.prefix))
            for side in self.factor_names
        )

    def bind(self, factors: tuple[Factor, ...]) -> None:
        """Take the factors for another view of the weight."""
        self.stored = self.statistics.factors = factors
        self.a, self.g = factors[0], factors[1] if len(factors) > 1 else None
        self.weight_view = self.a.view
        self.weight, shards = self.weight_view.parameter, self.weight_view.shards
        self.geometry = self.kind.geometry  # of the rows of the weight that are local
        if shards is not None:
            local = shards.own_of(self.weight_view.rows)
            self.geometry = self.geometry.with_rows(local.stop - local.start)

    # ---- for users -------------------------------------------------------------------------------

    def factors(self) -> tuple[Tensor | list[Tensor] | None, ...]:
        """Return the factors in use as dense matrices.

        They have zeros outside of the blocks if they are split.

        Returns:
            ``(A, G)``, of shapes ``(d_in, d_in)`` and ``(d_out, d_out)``, where ``d_in`` is the
            size of a patch for a convolution; for a grouped convolution two lists with one matrix
            per group. G is None for ThorMuon, which uses only A.

        Raises:
            RuntimeError: the layer has no factors yet.
        """
        return self._dense(inverse=False)

    def inverses(self) -> tuple[Tensor | list[Tensor] | None, ...]:
        """Return the damped inverses in use as dense matrices.

        They are ``(A + √(λ/T) I)⁻¹`` and ``(G + √(λ/T) I)⁻¹``.

        For ThorMuon they are ``(A + λ tr(A)/d_in I)⁻¹`` and None.

        Returns:
            Two matrices or lists, in the shapes of ``factors``.

        Raises:
            RuntimeError: the layer has no factors yet.
        """
        return self._dense(inverse=True)

    refreshes: int = _stored(
        "refreshes", "The number of times that new factors were taken and inverted.", int
    )
    stopped: bool = _stored(
        "stopped",
        "Whether the trace rule has stopped this layer: it takes no new factors any more.",
    )
    last_trace_change: float | None = _stored(
        "last_trace_change",
        "Δ of the latest refresh with factors to compare with; None before.",
        lambda change: None if change == _NO_CHANGE_YET else float(change),
    )
    rows_per_term: float = _stored(
        "rows_per_term", "T = R / N of the factors in use; 0 if there are none.", float
    )
    due: bool = _stored(
        "due", "Whether the next step with statistics applies the trace rule to this layer."
    )
    idle: bool = _stored(
        "idle",
        "Whether it was due when the loss did not reach it, and has not been reached since.",
        partial(operator.eq, IDLE),
    )
    uncalled: bool = _stored("uncalled", "Whether its weight is used without calling its module.")

    @property
    def life(self) -> Life:
        """Whether it takes part in refreshes."""
        idle = self.weight_view.state.get(self.prefix + "idle", NUMBERS["idle"])
        return Life(self.due, idle, self.uncalled, self.stopped)

    def __repr__(self) -> str:
        return (
            f"LayerCurvature({self.name!r}, {self.kind.label}, groups={self.kind.groups}, "
            f"d_in={self.kind.inputs}, d_out={self.kind.outputs}, refreshes={self.refreshes}, "
            f"stopped={self.stopped}, last_trace_change={self.last_trace_change})"
        )

    def _dense(self, *, inverse: bool) -> tuple[Tensor | list[Tensor] | None, ...]:
        if not self.refreshes:
            raise RuntimeError(
                f"layer {self.name!r} has no factors yet: they are taken in the first "
                f"optimizer.step() after a backward pass through the layer"
            )
        _ = self.weight_view.parameter  # raises if the module computes the weight now
        dense = [factor.dense(inverse=inverse) for factor in self.stored]
        matrices = [of_groups if self.kind.groups > 1 else of_groups[0] for of_groups in dense]
        return *matrices, *[None] * (len(SIDES) - len(matrices))

    # ---- the weight and its state ----------------------------------------------------------------

    @property
    def state(self) -> State:
        """The mapping that holds factors, inverses and counters; empty before the first step."""
        return self.weight_view.state

    def record(self, **numbers: float) -> None:
        """Write numbers of the state, if it exists."""
        state, prefix = self.weight_view.state, self.prefix
        if prefix + "refreshes" in state:
            state.update(
                {prefix + key: type(NUMBERS[key])(value) for key, value in numbers.items()}
            )

    # ---- creating and checking the state ---------------------------------------------------------

    def make_state(self) -> None:
        """Create all missing entries, so that checkpoints always have the same keys and shapes."""
        prefix, state, weight = self.prefix, self.state, self.weight
        if prefix + "refreshes" in state or not weight.requires_grad:
            return
        dtype, shards = factor_dtype(weight.dtype), self.weight_view.shards
        for factor in self.stored:
            factor.make_zeros(dtype, weight.device)
            if factor.layout.by_rows:
                state[SHARDS] = 1 if shards is None else shards.count
        state.update({prefix + key: value for key, value in NUMBERS.items()})
        if self.kind.has_own_rows:
            state[prefix + "group_rows_per_term"] = torch.zeros(
                self.kind.groups, dtype=dtype, device=weight.device
            )

    def missing_entries(self) -> list[str]:
        """Return the entries that the state lacks."""
        numbers = [*NUMBERS, "group_rows_per_term"] if self.kind.has_own_rows else list(NUMBERS)
        keys = [self.prefix + key for key in numbers]
        keys += [key for factor in self.stored for key in factor.layout.keys]
        return [key for key in keys if self.state.get(key) is None]
