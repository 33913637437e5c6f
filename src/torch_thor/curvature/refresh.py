"""A refresh: the trace rule decides which layers take new factors, and these are inverted."""

import enum
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.inverse import DAMPING_RAISES, Inverse, damped_inverses, relative_damping
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import ALONE, Processes
from torch_thor.curvature.statistics import Factors

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
    """Return Δ = | |now| − |before| | / |before|.

    Args:
        now: tr(F_now + λI).
        before: tr(F_before + λI), of the factors in use.

    Returns:
        Δ ≥ 0; inf if ``before`` is 0.
    """
    return abs(abs(now) - abs(before)) / abs(before) if before else math.inf


def decide(change: float, thresholds: tuple[float, float]) -> Decision:
    """Apply the thresholds of the trace rule.

    Args:
        change: Δ.
        thresholds: ``(ω1, ω2)``, ω1 ≥ ω2.

    Returns:
        UPDATE if Δ > ω1, STOP if Δ < ω2, else KEEP.
    """
    if change > thresholds[0]:
        return Decision.UPDATE
    return Decision.STOP if change < thresholds[1] else Decision.KEEP


@dataclass
class Candidate:
    """A layer with new statistics, on a refresh step.

    Args:
        layer: the layer.
        step: the step, counted from 0.
        factors: A and G of this step, or A alone; changed in place.
        rows_per_term: T of this step.
        damping: λ.
        thresholds: (ω1, ω2).
        decay: weight of the factors in use in the running average; 0 takes the new ones alone.
        group_rows_per_term: T of each group, if groups have their own rows; it is then part of their factors, and
            ``rows_per_term`` is 1.
    """

    layer: LayerCurvature
    step: int
    factors: Factors
    rows_per_term: float
    damping: float
    thresholds: tuple[float, float]
    decay: float
    group_rows_per_term: Tensor | None = None


@dataclass
class _Verdict:
    """The decision on a candidate.

    Args:
        candidate: the candidate.
        trace: tr(F + λI) of its new statistics.
        change: Δ; None if there is nothing to compare with.
        decision: the decision of the trace rule; changed to FAILED if the factors cannot be inverted.
        inverses: the damped inverses of its factors, after the running average; empty unless the decision is UPDATE.
    """

    candidate: Candidate
    trace: float
    change: float | None
    decision: Decision
    inverses: list[Inverse] = field(default_factory=list)


def refresh(
    candidates: Sequence[Candidate],
    report: Callable[[LayerCurvature, str], None],
    *,
    relative: bool = False,
    processes: Processes = ALONE,
) -> tuple[RefreshEvent, ...]:
    """Apply the trace rule to each layer, then invert the new factors of all layers together.

    Factors with NaN or inf are never inverted, and a layer with a block that is indefinite even at a hundred times its
    damping keeps its last good inverse. The caller decides whether such a layer stays due.

    Args:
        candidates: the layers that are due and have statistics.
        report: called with a layer and a sentence that describes a problem of the layer.
        relative: whether damping is relative to the mean diagonal of each factor; otherwise it is ``√(λ/T)``.
        processes: the processes that refresh together, with the same candidates; they take the same decisions.

    Returns:
        The result for each candidate, in their order.
    """
    if not candidates:
        return ()
    verdicts = _judge(candidates, relative, processes)
    _invert(verdicts, relative, processes)
    # if an error was raised so far (no memory, a lost process), nothing has changed; nothing raises from here on
    events = []
    for verdict in verdicts:
        _store_decision(verdict, report)
        layer, step = verdict.candidate.layer, verdict.candidate.step
        events.append(RefreshEvent(layer.name, step, verdict.decision, verdict.change, verdict.trace))
    return tuple(events)


def trace_of_fisher(
    layer: LayerCurvature, traces: Sequence[Sequence[float]], rows_per_term: float, damping: float
) -> float:
    """Return tr(T · A ⊗ G + λI), summed over groups (section 3.2). F includes T, as in the damped inverse.

    Args:
        layer: the layer.
        traces: the traces of A and of G, one number per group each; those of A alone if the layer has no G.
        rows_per_term: T of these factors.
        damping: λ.

    Returns:
        The trace; NaN or inf if a factor holds one.
    """
    size = layer.kind.groups * layer.kind.inputs * layer.kind.outputs
    products = map(operator.mul, *traces) if len(traces) > 1 else traces[0]
    return rows_per_term * math.fsum(products) + damping * size


def _judge(candidates: Sequence[Candidate], relative: bool, processes: Processes) -> list[_Verdict]:
    """Apply the trace rule to each candidate, with one host–device synchronisation for all layers."""
    traces: list[Tensor] = []
    for c in candidates:
        for factor in c.factors:
            traces.append(factor.group_traces())
        for key in c.layer.sides:
            traces.append(c.layer.matrix(key).group_traces())
    device = traces[0].device
    for i, trace in enumerate(traces):
        traces[i] = trace.to(device, torch.float64 if trace.dtype == torch.float64 else torch.float32)
    on_host: list[float] = torch.cat(traces).tolist()
    own: list[float] = []
    first = 0
    for c in candidates:
        damping = 0.0 if relative else c.damping  # relative damping multiplies both traces by the same number
        for rows_per_term in (c.rows_per_term, c.layer.rows_per_term):
            of_sides = []
            for _ in c.factors:
                of_sides.append(on_host[first : first + c.layer.kind.groups])
                first += c.layer.kind.groups
            own.append(trace_of_fisher(c.layer, of_sides, rows_per_term, damping))
    # The traces of the first process are used by all. On different hardware the last bits of a sum may differ, and if a
    # layer stopped on one process and not on another, their weights would differ from then on.
    agreed = processes.gather(own)[0] if processes.count > 1 else own
    verdicts = []
    for c, now_, before_ in zip(candidates, agreed[::2], agreed[1::2], strict=True):
        change, decision = None, Decision.UPDATE
        if not math.isfinite(now_):
            decision = Decision.FAILED
        elif c.layer.refreshes:
            change = trace_change(now_, before_)
            decision = decide(change, c.thresholds)
        verdicts.append(_Verdict(c, now_, change, decision))
    return verdicts


def _invert(verdicts: Sequence[_Verdict], relative: bool, processes: Processes) -> None:
    """Average new factors with those in use, and invert them for all layers at once."""
    damped: list[tuple[BlockDiagonal, float | Tensor]] = []
    for verdict in verdicts:
        if verdict.decision is not Decision.UPDATE:
            continue
        c = verdict.candidate
        for key, factor in zip(c.layer.sides, c.factors, strict=True):
            if c.decay and c.layer.refreshes:
                for part, old in zip(factor.parts(), c.layer.matrix(key).parts(), strict=True):
                    part.lerp_(old, c.decay)
            damping = relative_damping(factor, c.damping) if relative else math.sqrt(c.damping / c.rows_per_term)
            damped.append((factor, damping))
    inverses = iter(processes.invert(damped, damped_inverses) if processes.count > 1 else damped_inverses(damped))
    for verdict in verdicts:
        if verdict.decision is Decision.UPDATE:
            for _ in verdict.candidate.factors:
                verdict.inverses.append(next(inverses))


def _store_decision(verdict: _Verdict, report: Callable[[LayerCurvature, str], None]) -> None:
    """Store the decision and the new factors in the layer; the decision becomes FAILED if an inverse has failed."""
    layer, what = verdict.candidate.layer, ""
    if verdict.decision is Decision.FAILED:
        what = "its new factors hold NaN or inf and were not inverted"
    else:
        layer.record(verdict.change, stopped=True if verdict.decision is Decision.STOP else None)
        for inverse in verdict.inverses:
            if inverse.failed:
                verdict.decision = Decision.FAILED
                what = f"a block was not positive definite at {DAMPING_RAISES[-1]:g} times its damping"
    if verdict.decision is Decision.FAILED:
        then = "the last good inverse stays" if layer.refreshes else _PLAINLY
        report(layer, f"{what}; {then}")
        return
    if verdict.decision is not Decision.UPDATE:
        return
    c, matrices = verdict.candidate, []
    raised = False
    for inverse in verdict.inverses:
        matrices.append(inverse.matrix)
        raised = raised or inverse.raised
    layer.set_factors(c.factors, tuple(matrices), c.rows_per_term, c.group_rows_per_term)
    if raised:
        report(layer, "a block was not positive definite; its damping was raised for this refresh")
