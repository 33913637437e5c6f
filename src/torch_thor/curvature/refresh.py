"""When a layer takes new factors: the trace rule, and the inversion of those that pass it."""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.inverse import DAMPING_RAISES, Inverse, damped_inverses, relative_damping
from torch_thor.curvature.layer import Factors, LayerCurvature
from torch_thor.curvature.processes import ALONE, Processes


class Decision(enum.Enum):
    """What a refresh did with a layer: the three answers of the trace rule (Chen et al. 2021, section 3.2), or neither.

    UPDATE: new factors were taken and inverted. KEEP: the new statistics were thrown away. STOP: so they were, and the
    layer never refreshes again. FAILED: they held NaN or inf, or could not be inverted; the last good inverse stays.
    """

    UPDATE = "update"
    KEEP = "keep"
    STOP = "stop"
    FAILED = "failed"


@dataclass(frozen=True)
class RefreshEvent:
    """What one refresh did with one layer.

    Args:
        layer: the module's name.
        step: the optimizer step, counted from 0 as the parameter group counts it.
        decision: what was done.
        trace_change: Δ; None where there was nothing to compare with (the first refresh, or NaN in the new factors).
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
        Δ ≥ 0; inf where there was nothing before.
    """
    return abs(abs(now) - abs(before)) / abs(before) if before else math.inf


def decide(change: float, thresholds: tuple[float, float]) -> Decision:
    """Apply (ω1, ω2).

    Args:
        change: Δ.
        thresholds: ``(ω1, ω2)``, ω1 ≥ ω2.

    Returns:
        UPDATE where Δ > ω1, STOP where Δ < ω2, else KEEP.
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
        factors: A and G of this step, or A alone.
        rows_per_term: T of this step.
        damping: λ.
        thresholds: (ω1, ω2).
        decay: weight of the factors in use in the running average; 0 takes the new ones alone.
        group_rows_per_term: T of each group where they have rows of their own; it is in their factors then, and T is 1.
    """

    layer: LayerCurvature
    step: int
    factors: Factors
    rows_per_term: float
    damping: float
    thresholds: tuple[float, float]
    decay: float
    group_rows_per_term: Tensor | None = None


def refresh(
    candidates: Sequence[Candidate],
    report: Callable[[LayerCurvature, str], None],
    *,
    relative: bool = False,
    processes: Processes = ALONE,
) -> tuple[RefreshEvent, ...]:
    """Decide layer by layer, then invert what was taken, all layers in one go.

    Factors with NaN or inf are never inverted, and a layer whose block stays indefinite at a hundred times its damping
    keeps its last good inverse. Whether a layer is still due after that is for who gathers statistics to say.

    Args:
        candidates: the layers that are due and have statistics.
        report: called with a layer and a sentence on what went wrong with it.
        relative: whether damping is relative to the mean diagonal of each factor, in the place of ``√(λ/T)``.
        processes: those that refresh together, each with the same candidates; they decide alike.

    Returns:
        What was done with each candidate, in their order.
    """
    traces = _fisher_traces(candidates, relative, processes)
    judged = [_judge(c, now, before) for c, (now, before) in zip(candidates, traces, strict=True)]
    taken = [c for c, (decision, _) in zip(candidates, judged, strict=True) if decision is Decision.UPDATE]
    averaged, inverses = _invert(taken, relative, processes)
    # until here (out of memory, a lost process) nothing has changed, and from here on nothing raises
    for candidate, (decision, change) in zip(candidates, judged, strict=True):
        _note(candidate.layer, decision, change, report)
    failed = _put_to_use(taken, averaged, inverses, report)
    return tuple(
        RefreshEvent(c.layer.name, c.step, Decision.FAILED if c.layer in failed else decision, change, now)
        for c, (decision, change), (now, _) in zip(candidates, judged, traces, strict=True)
    )


def _judge(candidate: Candidate, now: float, before: float) -> tuple[Decision, float | None]:
    if not math.isfinite(now):
        return Decision.FAILED, None
    if not candidate.layer.refreshes:
        return Decision.UPDATE, None
    change = trace_change(now, before)
    return decide(change, candidate.thresholds), change


def _note(
    layer: LayerCurvature, decision: Decision, change: float | None, report: Callable[[LayerCurvature, str], None]
) -> None:
    if decision is Decision.FAILED:
        report(layer, f"its new factors hold NaN or inf and were not inverted; {_instead(layer)}")
        return
    layer.record(change, stopped=True if decision is Decision.STOP else None)


def _invert(
    taken: Sequence[Candidate], relative: bool, processes: Processes
) -> tuple[list[Factors], list[list[Inverse]]]:
    """Return, of each candidate, the factors to be put to use and their inverses."""
    averaged = [tuple(_average(c, key, new) for key, new in zip(c.layer.sides, c.factors, strict=True)) for c in taken]
    damped = [
        (f, relative_damping(f, c.damping) if relative else math.sqrt(c.damping / c.rows_per_term))
        for c, factors in zip(taken, averaged, strict=True)
        for f in factors
    ]
    inverses = iter(processes.invert(damped, damped_inverses))
    return averaged, [[next(inverses) for _ in factors] for factors in averaged]


def _put_to_use(
    taken: Sequence[Candidate],
    averaged: Sequence[Factors],
    inverses: Sequence[Sequence[Inverse]],
    report: Callable[[LayerCurvature, str], None],
) -> set[LayerCurvature]:
    """Have the layers take what could be inverted; return those whose factors could not."""
    failed = set()
    for candidate, factors, found in zip(taken, averaged, inverses, strict=True):
        layer = candidate.layer
        if any(inverse.failed for inverse in found):
            failed.add(layer)
            what = f"a block was not positive definite at {DAMPING_RAISES[-1]:g} times its damping"
            report(layer, f"{what}; {_instead(layer)}")
            continue
        matrices = tuple(inverse.matrix for inverse in found)
        layer.take(factors, matrices, candidate.rows_per_term, candidate.group_rows_per_term)
        if any(inverse.raised for inverse in found):
            report(layer, "a block was not positive definite; its damping was raised for this refresh")
    return failed


def _instead(layer: LayerCurvature) -> str:
    if layer.refreshes:
        return "the last good inverse stays"
    return "it takes its plain gradient, and the next step tries again"


def _average(candidate: Candidate, key: str, new: BlockDiagonal) -> BlockDiagonal:
    if not candidate.decay or not candidate.layer.refreshes:
        return new
    old = candidate.layer.matrix(key)
    return new.with_parts([n.lerp(o, candidate.decay) for n, o in zip(new.parts(), old.parts(), strict=True)])


def _fisher_traces(candidates: Sequence[Candidate], relative: bool, processes: Processes) -> list[tuple[float, float]]:
    """Return tr(F + λI) of the new factors and of those in use, with one wait for the device for all layers.

    Where several processes decide, the numbers are the first one's: on unlike hardware the last bits of a sum differ,
    and a layer that stops on one process and not on another would part them for good.
    """
    traces: list[Tensor] = []
    for c in candidates:
        traces += [f.group_traces() for f in c.factors]
        traces += [c.layer.matrix(key).group_traces() for key in c.layer.sides]
    if not traces:
        return []
    device = traces[0].device
    flat = torch.cat([t.to(device, torch.float64 if t.dtype == torch.float64 else torch.float32) for t in traces])
    on_host = iter(flat.cpu().split([len(t) for t in traces]))
    result = []
    for c in candidates:
        damping = 0.0 if relative else c.damping  # relative damping scales both traces alike
        now = c.layer.trace_of_fisher([next(on_host) for _ in c.factors], c.rows_per_term, damping)
        before = c.layer.trace_of_fisher([next(on_host) for _ in c.factors], c.layer.rows_per_term, damping)
        result.append((now, before))
    agreed = iter(processes.gather([trace for pair in result for trace in pair])[0])
    return list(zip(agreed, agreed, strict=True))
