"""A refresh: the trace rule decides which layers take new factors, and these are inverted.

If several processes train together, each has gathered the statistics of its own rows. The traces
are summed over the processes first. Only the factors of layers that take them are summed and
inverted, each block by the process that owns it, and sent to all.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks, wide_dtype
from torch_thor.curvature.communication import SINGLE_PROCESS, Processes
from torch_thor.curvature.inverse import (
    DAMPING_RAISES,
    NOT_POSITIVE,
    NewFactor,
    invert_,
    relative_damping,
)
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.lifecycle import Decision

_RAISED = "a block was not positive definite; its damping was raised for this refresh"
_PLAINLY = "it takes its plain gradient, and the next step tries again"


@dataclass(frozen=True)
class RefreshEvent:
    """The result of one refresh for one layer.

    Args:
        layer: the layer's name.
        step: the step of the layer's parameter group, counted from 0.
        decision: the decision.
        trace_change: Δ; None if there was nothing to compare with, in the first refresh.
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
    thresholds: tuple[float, float] | None  # (ω1, ω2); None without a trace rule
    decay: float  # weight of the old factors in the running average; 0 takes only the new factors
    group_rows_per_term: Tensor | None = None  # T of each group, if groups have their own rows
    # for each group, whether it keeps the factors in use; empty if none does
    without_rows: Sequence[bool] = ()
    # what judge() finds
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
        size = layer.kind.groups * layer.kind.inputs * layer.kind.outputs
        # relative damping multiplies both traces by the same number
        damping = 0.0 if relative else self.damping
        # tr(T · A ⊗ G + λI), summed over groups (section 3.2). F includes T, as in the damped
        # inverse
        self.trace, in_use = (
            rows_per_term * math.fsum(map(math.prod, zip(*traces, strict=True))) + damping * size
            for traces, rows_per_term in ((now, self.rows_per_term), (before, layer.rows_per_term))
        )
        if layer.refreshes:
            self.change = abs(abs(self.trace) - abs(in_use)) / abs(in_use) if in_use else math.inf
            if self.thresholds is not None:
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

    def commit(self, report: Callable[[str, str], None]) -> RefreshEvent:
        """Store the decision and the new factors; where an inverse has failed, it is FAILED."""
        layer = self.layer
        level = max((new.level for new in self.new), default=0)
        if self.change is not None:
            layer.record(last_trace_change=self.change)
        if level == NOT_POSITIVE:
            self.decision = Decision.FAILED
            then = "the last good inverse stays" if layer.refreshes else _PLAINLY
            raised = f"{DAMPING_RAISES[-1]:g} times its damping"
            report(f"a block was not positive definite at {raised}; {then}", layer.name)
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
                report(_RAISED, layer.name)
        return RefreshEvent(layer.name, self.step, self.decision, self.change, self.trace)


def refresh(
    candidates: Sequence[Candidate],
    report: Callable[[str, str], None],
    *,
    relative: bool = False,
    processes: Processes = SINGLE_PROCESS,
) -> tuple[RefreshEvent, ...]:
    """Apply the trace rule to each layer, then invert the new factors of all layers together.

    Args:
        candidates: the layers with their new factors.
        report: told of problems, with the name of the layer.
        relative: whether the damping is relative to the mean diagonal of a factor.
        processes: those that train together.

    Returns:
        The decisions, one for each layer.

    Raises:
        FloatingPointError: new factors hold NaN or inf; nothing has changed.
    """
    if not candidates:
        return ()
    new, in_use = _traces(candidates, processes)
    for candidate in candidates:
        candidate.judge(new[candidate.layer], in_use[candidate.layer], relative)
    bad = [candidate.layer.name for candidate in candidates if not math.isfinite(candidate.trace)]
    if bad:
        raise FloatingPointError(
            f"the inputs or gradients of layers {', '.join(bad[:5])} hold NaN or inf; weights and "
            "state are as before this step. Lower lr, raise damping, clip the gradients, or skip "
            "it; torch_thor.check_gradients(optimizer) looks in every step"
        )
    invert_([factor for candidate in candidates for factor in candidate.new], processes)
    # if an error was raised so far (no memory, a lost process), nothing has changed; nothing raises
    # from here on
    return tuple(candidate.commit(report) for candidate in candidates)


_Traces = dict[LayerCurvature, list[list[float]]]  # by side and group


def _traces(candidates: Sequence[Candidate], processes: Processes) -> tuple[_Traces, _Traces]:
    """Return the traces of new factors, and of those in use; the host waits for the device once."""
    stored = [factor for candidate in candidates for factor in candidate.layer.stored]
    vectors = [sums.traces() for candidate in candidates for sums in candidate.factors]
    vectors += [factor.read().traces() for factor in stored]
    device = vectors[0].device
    is_wide = any(vector.dtype == torch.float64 for vector in vectors)
    dtype = wide_dtype(device) if is_wide else torch.float32
    rows = processes.gather(torch.cat([vector.to(device, dtype) for vector in vectors]).tolist())
    half = len(rows[0]) // 2
    new = [sum(of_processes) for of_processes in zip(*rows, strict=True)][:half]
    # Those of the first process: on different hardware the last bits of a sum may differ, and if a
    # layer stopped on one process and not on another, their weights would differ from then on.
    in_use = rows[0][half:]
    first = 0
    for factor in stored:
        owners = factor.layout.owners
        if owners is not None:  # there is one group: every owner adds the trace of its blocks
            in_use[first] = sum(
                row[half + first]
                for rank, row in enumerate(rows)
                if any(bounds[rank] < bounds[rank + 1] for bounds in owners.bounds)
            )
        first += factor.layout.block_sizes.groups
    return _by_layer(candidates, new), _by_layer(candidates, in_use)


def _by_layer(candidates: Sequence[Candidate], traces: Iterable[float]) -> _Traces:
    """Return the traces of each layer, by side and group."""
    following = iter(traces)
    return {
        candidate.layer: [
            list(islice(following, candidate.layer.kind.groups)) for _ in candidate.factors
        ]
        for candidate in candidates
    }
