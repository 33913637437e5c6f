"""A refresh: the trace rule decides which layers take new factors, and these are inverted.

If several processes train together, each has gathered the statistics of its own rows. The traces are summed over the
processes first. Only the factors of layers that take them are summed and inverted, each block by the process that owns
it, and sent to all.
"""

import enum
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.inverse import DAMPING_RAISES, KeptBlocks, NewBlocks, invert_, relative_damping
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.owned_blocks import OwnedBlocks
from torch_thor.curvature.processes import ALONE, Processes
from torch_thor.curvature.row_shards import ShardedBlocks, ShardedLayout
from torch_thor.curvature.statistics import Sums

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

    layer: LayerCurvature  # the layer
    step: int  # the step, counted from 0
    factors: Sums
    rows_per_term: float  # T of this step
    damping: float  # λ
    thresholds: tuple[float, float]  # (ω1, ω2)
    decay: float  # weight of the factors in use in the running average; 0 takes the new ones alone
    group_rows_per_term: Tensor | None = None  # T of each group, if groups have their own rows
    without_rows: Sequence[bool] = ()  # for each group, whether it keeps the factors in use; empty if none does


@dataclass
class _Verdict:
    """The decision on a candidate."""

    candidate: Candidate  # the candidate
    trace: float  # tr(F + λI) of its new statistics
    change: float | None  # Δ; None if there is nothing to compare with
    decision: Decision  # the decision of the trace rule; FAILED if the new factors are not finite
    traces: list[list[float]]  # for each side the trace of its new factor, of each group, after the running average
    new: list[list[NewBlocks]] = field(default_factory=list)


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
    new: list[NewBlocks] = []
    for verdict in verdicts:
        if verdict.decision is Decision.UPDATE:
            new += _new_blocks(verdict, relative)
    invert_(new, processes)
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
    """Return tr(T · A ⊗ G + λI), summed over groups (section 3.2). F includes T, as in the damped inverse."""
    size = layer.kind.groups * layer.kind.inputs * layer.kind.outputs
    products = map(operator.mul, *traces) if len(traces) > 1 else traces[0]
    return rows_per_term * math.fsum(products) + damping * size


def _judge(candidates: Sequence[Candidate], relative: bool, processes: Processes) -> list[_Verdict]:
    """Apply the trace rule to each candidate, with one host–device synchronisation for all layers."""
    traces: list[Tensor] = []
    for c in candidates:
        for factor in c.factors:
            traces.append(factor.group_traces())
    for c in candidates:
        for key in c.layer.sides:
            traces.append(c.layer.stored.read(key).group_traces())
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
        for i, process in _divided(candidates):
            if process == 0:
                in_use[i] = 0.0
            in_use[i] += rows[process][len(new) + i]
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


def _divided(candidates: Sequence[Candidate]) -> Iterator[tuple[int, int]]:
    """Yield the index of each trace whose factor is divided, with every process that owns a part of it."""
    i = 0
    for c in candidates:
        for side, layout in c.layer.layouts().items():
            owners = c.layer.stored.owners.get(side)
            if isinstance(layout, ShardedLayout):
                yield from ((i, process) for process in layout.owners)
            elif owners is not None:
                of_groups = range(i, i + layout.groups)
                yield from itertools.product(of_groups, range(len(owners.bounds[0]) - 1))
            i += layout.groups


def _new_blocks(verdict: _Verdict, relative: bool) -> list[NewBlocks]:
    """Return the blocks of the new factors of a layer, with all that their inversion needs, and note them."""
    c, found = verdict.candidate, []
    for key, factor, traces in zip(c.layer.sides, c.factors, verdict.traces, strict=True):
        damping = [math.sqrt(c.damping / c.rows_per_term)] * len(traces)
        if relative:
            for i, trace in enumerate(traces):
                damping[i] = relative_damping(trace, factor.layout.size, c.damping, factor.blocks.dtype)
        in_use = c.layer.stored.read(key).parts() if c.layer.refreshes else []
        owners = c.layer.stored.owners.get(key)
        if isinstance(factor, ShardedBlocks):
            of_side = _blocks_of_rows(c, factor, damping, in_use)
        else:
            of_side = []
            for i, blocks in enumerate(factor.parts()):
                kept = None if owners is None else KeptBlocks(owners.bounds[i], owners.rank)
                old = in_use[i] if in_use else None
                of_side.append(NewBlocks(blocks, damping, old, c.decay, c.without_rows, kept))
        verdict.new.append(of_side)
        found += of_side
    return found


def _blocks_of_rows(
    c: Candidate, factor: ShardedBlocks, damping: Sequence[float], in_use: Sequence[Tensor]
) -> list[NewBlocks]:
    """Return the blocks of a factor whose rows are divided; ``in_use`` holds those of the rows of this process."""
    shards, parts = c.layer.weight_view.shards, factor.parts()
    assert shards is not None
    old = factor.spread(in_use) if in_use else [None] * len(parts)
    return [
        NewBlocks(blocks, damping, its_old, c.decay, kept=KeptBlocks(bounds, shards.source, shards.replicas))
        for blocks, bounds, its_old in zip(parts, factor.bounds(), old, strict=True)
    ]


def _store_decision(verdict: _Verdict, report: Callable[[LayerCurvature, str], None]) -> None:
    """Store the decision and the new factors in the layer; the decision becomes FAILED if an inverse has failed."""
    c, layer, what = verdict.candidate, verdict.candidate.layer, ""
    factors: list[BlockDiagonal | OwnedBlocks] = []
    inverses: list[BlockDiagonal | OwnedBlocks] = []
    raised = False
    if verdict.decision is Decision.FAILED:
        what = "its new factors hold NaN or inf and were not inverted"
    else:
        layer.record(verdict.change, stopped=True if verdict.decision is Decision.STOP else None)
    for key, factor, of_side in zip(layer.sides, c.factors, verdict.new, strict=False):
        owners = layer.stored.owners.get(key)
        for one in of_side:
            raised = raised or one.raised
            if one.failed:
                verdict.decision = Decision.FAILED
                what = f"a block was not positive definite at {DAMPING_RAISES[-1]:g} times its damping"
        for found, parts in ((factors, [one.blocks for one in of_side]), (inverses, [one.inverse for one in of_side])):
            if isinstance(factor, ShardedBlocks):
                found.append(factor.of_owner(parts))
            else:
                found.append(factor.with_parts(parts) if owners is None else OwnedBlocks(owners, parts))
    if verdict.decision is Decision.FAILED:
        then = "the last good inverse stays" if layer.refreshes else _PLAINLY
        report(layer, f"{what}; {then}")
    elif verdict.decision is Decision.UPDATE:
        layer.set_factors(tuple(factors), tuple(inverses), c.rows_per_term, c.group_rows_per_term, verdict.traces[0])
        if raised:
            report(layer, "a block was not positive definite; its damping was raised for this refresh")
