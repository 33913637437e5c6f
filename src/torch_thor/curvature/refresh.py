"""A refresh: the trace rule decides which layers take new factors, and these are inverted.

If several processes train together, each has gathered the statistics of its own rows. The traces are summed over the
processes first. Only the factors of layers that take them are summed and inverted, each block by the process that owns
it, and sent to all.
"""

import enum
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.inverse import DAMPING_RAISES, NewFactor, invert_, relative_damping
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import ALONE, Processes

_PLAINLY = "it takes its plain gradient, and the next step tries again"


class Decision(enum.Enum):
    """The result of a refresh for one layer: a case of the trace rule (Chen et al. 2021, section 3.2), or a failure.

    UPDATE: new factors were taken and inverted. KEEP: the new statistics were dropped. STOP: the new statistics were
    dropped, and the layer never refreshes again. FAILED: the new factors held NaN or inf, or could not be inverted; the
    last good inverse stays in use.
    """

    UPDATE = "update"
    KEEP = "keep"
    STOP = "stop"
    FAILED = "failed"


@dataclass(frozen=True)
class RefreshEvent:
    """The result of one refresh for one layer.

    Args:
        layer: the layer's name.
        step: the step of the layer's parameter group, counted from 0.
        decision: the decision.
        trace_change: Δ; None if there was nothing to compare with (in the first refresh, or for NaN in new factors).
        trace: tr(F + λI) of the new statistics, with the current λ.
    """

    layer: str
    step: int
    decision: Decision
    trace_change: float | None
    trace: float


def trace_change(now: float, before: float) -> float:
    """Return Δ = | |now| − |before| | / |before|."""
    return abs(abs(now) - abs(before)) / abs(before) if before else math.inf


def decide(change: float, thresholds: tuple[float, float]) -> Decision:
    """Apply the thresholds of the trace rule."""
    if change > thresholds[0]:
        return Decision.UPDATE
    return Decision.STOP if change < thresholds[1] else Decision.KEEP


@dataclass
class Candidate:
    """A layer with new statistics, on a refresh step."""

    layer: LayerCurvature
    step: int  # counted from 0
    factors: list[Blocks]  # A and G of the rows of this process, for the blocks of all
    rows_per_term: float  # T of this step
    damping: float  # λ
    thresholds: tuple[float, float]  # (ω1, ω2)
    decay: float  # weight of the factors in use in the running average; 0 takes the new ones alone
    group_rows_per_term: Tensor | None = None  # T of each group, if groups have their own rows
    without_rows: Sequence[bool] = ()  # for each group, whether it keeps the factors in use; empty if none does


@dataclass
class _Verdict:
    """The decision on a candidate."""

    candidate: Candidate
    trace: float  # tr(F + λI) of its new statistics
    change: float | None  # Δ; None if there is nothing to compare with
    decision: Decision  # the decision of the trace rule; FAILED if the new factors are not finite
    traces: list[list[float]]  # for each side the trace of its new factor, of each group, after the running average
    new: list[NewFactor] = field(default_factory=list)

    def make_new(self, *, relative: bool) -> list[NewFactor]:
        """Return the new factors of the layer, with all that their inversion needs."""
        c = self.candidate
        # experts that have never had a row take the plain gradient: the inverse of their zeros would be I / √λ
        plain = [trace == 0 for trace in self.traces[0]] if c.layer.kind.routed else []
        for factor, sums, traces in zip(c.layer.stored, c.factors, self.traces, strict=True):
            damping = [math.sqrt(c.damping / c.rows_per_term)] * len(traces)
            if relative:
                size = sums.cut.rows // sums.cut.groups
                damping = [relative_damping(trace, size, c.damping, sums.dtype) for trace in traces]
            in_use = factor.read() if c.layer.refreshes else None
            self.new.append(NewFactor(factor, sums, damping, in_use, c.decay, c.without_rows, plain))
        return self.new

    def commit(self, report: Callable[[LayerCurvature, str], None]) -> RefreshEvent:
        """Store the decision and the new factors; the decision becomes FAILED if an inverse has failed."""
        c, layer, what = self.candidate, self.candidate.layer, "its new factors hold NaN or inf and were not inverted"
        if self.decision is not Decision.FAILED:
            if self.change is not None:
                layer.record(last_trace_change=self.change)
            if self.decision is Decision.STOP:
                layer.record(stopped=True)
        if any(one.failed for one in self.new):
            self.decision = Decision.FAILED
            what = f"a block was not positive definite at {DAMPING_RAISES[-1]:g} times its damping"
        if self.decision is Decision.FAILED:
            report(layer, f"{what}; {'the last good inverse stays' if layer.refreshes else _PLAINLY}")
        elif self.decision is Decision.UPDATE:
            for one in self.new:
                one.store()
            if c.group_rows_per_term is not None:
                layer.state[layer.prefix + "group_rows_per_term"] = c.group_rows_per_term
            layer.record(rows_per_term=c.rows_per_term, refreshes=layer.refreshes + 1)
            if any(one.raised for one in self.new):
                report(layer, "a block was not positive definite; its damping was raised for this refresh")
        return RefreshEvent(layer.name, c.step, self.decision, self.change, self.trace)


def refresh(
    candidates: Sequence[Candidate],
    report: Callable[[LayerCurvature, str], None],
    *,
    relative: bool = False,
    processes: Processes = ALONE,
) -> tuple[RefreshEvent, ...]:
    """Apply the trace rule to each layer, then invert the new factors of all layers together."""
    if not candidates:
        return ()
    verdicts = _judge(candidates, relative, processes)
    taken = [one for v in verdicts if v.decision is Decision.UPDATE for one in v.make_new(relative=relative)]
    invert_(taken, processes)
    # if an error was raised so far (no memory, a lost process), nothing has changed; nothing raises from here on
    return tuple(verdict.commit(report) for verdict in verdicts)


def trace_of_fisher(
    layer: LayerCurvature, traces: Sequence[Sequence[float]], rows_per_term: float, damping: float
) -> float:
    """Return tr(T · A ⊗ G + λI), summed over groups (section 3.2). F includes T, as in the damped inverse."""
    size = layer.kind.groups * layer.kind.inputs * layer.kind.outputs
    products = map(operator.mul, *traces) if len(traces) > 1 else traces[0]
    return rows_per_term * math.fsum(products) + damping * size


def _judge(candidates: Sequence[Candidate], relative: bool, processes: Processes) -> list[_Verdict]:
    """Apply the trace rule to each candidate, with one host–device synchronisation for all layers."""
    stored = [factor for c in candidates for factor in c.layer.stored]
    traces = [sums.traces() for c in candidates for sums in c.factors] + [factor.read().traces() for factor in stored]
    device = traces[0].device
    for i, trace in enumerate(traces):
        traces[i] = trace.to(device, torch.float64 if trace.dtype == torch.float64 else torch.float32)
    numbers: list[float] = torch.cat(traces).tolist()
    new, in_use = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    if processes.count > 1:
        rows = processes.gather(numbers)
        new = [sum(of_processes) for of_processes in zip(*rows, strict=True)][: len(new)]
        # Those of the first process: on different hardware the last bits of a sum may differ, and if a layer stopped on
        # one process and not on another, their weights would differ from then on.
        in_use = rows[0][len(new) :]
        i = 0
        for factor in stored:
            if factor.owners is not None:  # which have one group: every owner adds the trace of its blocks
                starts = [sum(of_run[r + 1] - of_run[r] for of_run in factor.owners.bounds) for r in range(len(rows))]
                in_use[i] = sum(rows[r][len(new) + i] for r, blocks in enumerate(starts) if blocks)
            i += factor.cut.groups
    verdicts, first = [], 0
    for c in candidates:
        now, before = [], []
        for _ in c.factors:
            last = first + c.layer.kind.groups
            now.append(new[first:last])
            before.append(in_use[first:last])
            first = last
        for i, keeps in enumerate(c.without_rows):
            if keeps:
                for now_of_side, before_of_side in zip(now, before, strict=True):
                    now_of_side[i] = before_of_side[i]
        damping = 0.0 if relative else c.damping  # relative damping multiplies both traces by the same number
        fisher = trace_of_fisher(c.layer, now, c.rows_per_term, damping)
        change, decision = None, Decision.UPDATE
        if not math.isfinite(fisher):
            decision = Decision.FAILED
        elif c.layer.refreshes:
            change = trace_change(fisher, trace_of_fisher(c.layer, before, c.layer.rows_per_term, damping))
            decision = decide(change, c.thresholds)
        if c.decay and c.layer.refreshes:
            for now_of_side, before_of_side in zip(now, before, strict=True):
                for i, old in enumerate(before_of_side):
                    now_of_side[i] += c.decay * (old - now_of_side[i])
        verdicts.append(_Verdict(c, fisher, change, decision, now))
    return verdicts
