"""A refresh: the trace rule decides which layers take new factors, and these are inverted.

If several processes train together, each has gathered the statistics of its own rows. The traces
are summed over the processes first. Only the factors of layers that take them are summed and
inverted, each block by the process that owns it, and sent to all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks, wide_dtype
from torch_thor.curvature.communication import SINGLE_PROCESS, Processes
from torch_thor.curvature.factor import Factor
from torch_thor.curvature.inverse import (
    DAMPING_RAISES,
    NOT_POSITIVE,
    NewFactor,
    invert_,
    relative_damping,
)
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.lifecycle import Decision

_PLAINLY = "it takes its plain gradient, and the next step tries again"


@dataclass(frozen=True)
class RefreshEvent:
    """The result of one refresh for one layer.

    Args:
        layer: the layer's name.
        step: the step of the layer's parameter group, counted from 0.
        decision: the decision.
        trace_change: Δ; None if there was nothing to compare with (in the first refresh, or for NaN
            in new factors).
        trace: tr(F + λI) of the new statistics, with the current λ.
    """

    layer: str
    step: int
    decision: Decision
    trace_change: float | None
    trace: float


def decide(change: float, thresholds: tuple[float, float]) -> Decision:
    """Apply the thresholds of the trace rule."""
    if change > thresholds[0]:
        return Decision.UPDATE
    return Decision.STOP if change < thresholds[1] else Decision.KEEP


@dataclass
class Candidate:
    """A layer with new statistics on a refresh step, and what is decided on it."""

    layer: LayerCurvature
    step: int  # counted from 0
    factors: list[Blocks]  # A and G of the rows of this process, for the blocks of all
    rows_per_term: float  # T of this step
    damping: float  # λ
    thresholds: tuple[float, float]  # (ω1, ω2)
    decay: float  # weight of the factors in use in the running average; 0 takes the new ones alone
    group_rows_per_term: Tensor | None = None  # T of each group, if groups have their own rows
    # for each group, whether it keeps the factors in use; empty if none does
    without_rows: Sequence[bool] = ()
    # whether the factors have numbers; without them, every trace counts as 1, and they are taken
    has_numbers: bool = True
    # what judge() finds
    traces: Sequence[Sequence[float]] = ()  # of the new factors, by side and group
    decision: Decision = Decision.UPDATE
    trace: float = 0.0
    change: float | None = None
    new: list[NewFactor] = field(default_factory=list)

    def judge(self, now: list[list[float]], before: list[list[float]], relative: bool) -> None:
        """Apply the trace rule to the traces of new factors and those in use, by side and group."""
        layer = self.layer
        for i in compress(range(layer.kind.groups), self.without_rows):
            for new, old in zip(now, before, strict=True):
                new[i] = old[i]
        self.traces = now
        size = layer.kind.groups * layer.kind.inputs * layer.kind.outputs
        # relative damping multiplies both traces by the same number
        damping = 0.0 if relative else self.damping
        # tr(T · A ⊗ G + λI), summed over groups (section 3.2). F includes T, as in the damped
        # inverse
        self.trace, in_use = (
            rows_per_term * math.fsum(map(math.prod, zip(*traces, strict=True))) + damping * size
            for traces, rows_per_term in ((now, self.rows_per_term), (before, layer.rows_per_term))
        )
        if not math.isfinite(self.trace):
            self.decision = Decision.FAILED
        elif layer.refreshes and self.has_numbers:
            self.change = abs(abs(self.trace) - abs(in_use)) / abs(in_use) if in_use else math.inf
            self.decision = decide(self.change, self.thresholds)
        if self.decision is not Decision.UPDATE:
            return
        decay = self.decay if layer.refreshes else 0.0  # else there is nothing to average with
        plain: list[bool] = []
        for factor, sums, new, old in zip(layer.stored, self.factors, now, before, strict=True):
            averaged = [n + decay * (o - n) for n, o in zip(new, old, strict=True)]
            if layer.kind.has_own_rows and not self.new:
                # experts that have never had a row take the plain gradient: the inverse of their
                # zeros would be I / √λ
                plain = [trace == 0 for trace in averaged]
            added = [math.sqrt(self.damping / self.rows_per_term)] * len(new)
            if relative:
                size, dtype = sums.block_sizes.rows // sums.block_sizes.groups, sums.rows.dtype
                added = [relative_damping(trace, size, self.damping, dtype) for trace in averaged]
            stored = factor.read() if decay or self.without_rows else None
            self.new.append(NewFactor(factor, sums, added, stored, decay, self.without_rows, plain))

    def commit(self, report: Callable[[LayerCurvature, str], None]) -> RefreshEvent:
        """Store the decision and the new factors; where an inverse has failed, it is FAILED."""
        layer, what = self.layer, "its new factors hold NaN or inf and were not inverted"
        level = max((new.level for new in self.new), default=0)
        if self.change is not None:
            layer.record(last_trace_change=self.change)
        if level == NOT_POSITIVE:
            self.decision = Decision.FAILED
            what = f"a block was not positive definite at {DAMPING_RAISES[-1]:g} times its damping"
        if self.decision is Decision.FAILED:
            report(
                layer, f"{what}; {'the last good inverse stays' if layer.refreshes else _PLAINLY}"
            )
        elif self.decision is Decision.UPDATE:
            for new in self.new:
                for inverse, parts in ((False, new.blocks), (True, new.inverses)):
                    stored = new.factor.read(inverse=inverse).parts
                    for into, blocks in zip(stored, filter(len, parts), strict=True):
                        into.copy_(blocks)
            if self.group_rows_per_term is not None:
                layer.state[layer.prefix + "group_rows_per_term"] = self.group_rows_per_term
            layer.record(rows_per_term=self.rows_per_term, refreshes=layer.refreshes + 1)
            if level:
                report(
                    layer,
                    "a block was not positive definite; its damping was raised for this refresh",
                )
        return RefreshEvent(layer.name, self.step, self.decision, self.change, self.trace)


class Beside:
    """Numbers on the device that are read in the same wait as the traces.

    Args:
        values: a vector in float32.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.numbers: list[float] | None = None  # once they are read

    def read(self) -> list[float]:
        """Return the numbers, with a wait of their own if there were no traces."""
        if self.numbers is None:
            self.numbers = self.values.tolist() if len(self.values) else []
        return self.numbers


def refresh(
    candidates: Sequence[Candidate],
    report: Callable[[LayerCurvature, str], None],
    *,
    relative: bool = False,
    processes: Processes = SINGLE_PROCESS,
    found_inf: Tensor | None = None,
    beside: Beside | None = None,
) -> tuple[RefreshEvent, ...]:
    """Apply the trace rule to each layer, then invert the new factors of all layers together.

    Args:
        candidates: the layers with their new factors.
        report: told of problems of a layer.
        relative: whether the damping is relative to the mean diagonal of a factor.
        processes: those that train together.
        found_inf: a number on the device, 1 if a gradient of this step is not finite.
        beside: other numbers to read; all processes get those of the first.

    Returns:
        The decisions, one for each layer.

    Raises:
        FloatingPointError: ``found_inf`` is 1; nothing has changed.
    """
    if not candidates:
        return ()
    known = [candidate for candidate in candidates if candidate.has_numbers]
    stored = [factor for candidate in known for factor in candidate.layer.stored]
    traces = [sums.traces() for candidate in known for sums in candidate.factors]
    traces += [factor.read().traces() for factor in stored]
    if not traces:
        beside = None  # it is read by itself
    vectors = [*traces, *(() if beside is None else [beside.values])]
    vectors += () if found_inf is None else [found_inf.reshape(1)]
    # with one host–device synchronisation for all layers
    numbers: list[float] = []
    if vectors:
        device = vectors[0].device
        is_wide = any(vector.dtype == torch.float64 for vector in vectors)
        dtype = wide_dtype(device) if is_wide else torch.float32
        numbers = torch.cat([vector.to(dtype).to(device) for vector in vectors]).tolist()
    if found_inf is not None and numbers.pop():
        raise FloatingPointError("gradients are not finite")
    if beside is not None:
        count = len(numbers) - len(beside.values)
        beside.numbers = processes.gather(numbers[count:])[0]
        numbers = numbers[:count]
    rows = processes.gather(numbers) if processes.count > 1 else [numbers]
    numbers_of = tuple(map(iter, _traces_of_all(rows, stored)))
    for candidate in candidates:
        now, before = (
            [
                [next(of) if candidate.has_numbers else 1.0 for _ in range(groups)]
                for groups in [candidate.layer.kind.groups] * len(candidate.factors)
            ]
            for of in numbers_of
        )
        candidate.judge(now, before, relative)
    invert_([factor for candidate in candidates for factor in candidate.new], processes)
    # if an error was raised so far (no memory, a lost process), nothing has changed; nothing raises
    # from here on
    return tuple(candidate.commit(report) for candidate in candidates)


def _traces_of_all(
    rows: Sequence[list[float]], stored: Sequence[Factor]
) -> tuple[list[float], list[float]]:
    """Return the traces of new factors and of those in use, from those that each process has."""
    half = len(rows[0]) // 2
    new = [sum(of_processes) for of_processes in zip(*rows, strict=True)][:half]
    # Those of the first process: on different hardware the last bits of a sum may differ, and if a
    # layer stopped on one process and not on another, their weights would differ from then on.
    in_use = rows[0][half:]
    i = 0
    for factor in stored:
        owners = factor.layout.owners
        # which have one group: every owner adds the trace of its blocks
        if owners is not None:
            in_use[i] = sum(
                row[half + i]
                for rank, row in enumerate(rows)
                if any(bounds[rank] < bounds[rank + 1] for bounds in owners.bounds)
            )
        i += factor.layout.block_sizes.groups
    return new, in_use
