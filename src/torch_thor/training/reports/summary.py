"""The summary of a run: its results as tables and as JSON values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from torch_thor.training.engine.history import AVERAGED, EvalPoint, History
from torch_thor.training.engine.refreshes import curvature_of
from torch_thor.training.printing import cell
from torch_thor.training.tasks.task import Metric, primary


@dataclass(frozen=True)
class Refreshed:
    """The decisions of the trace rule about one layer, over the whole run.

    Args:
        layer: The name of the layer.
        refreshes: How often it took new factors.
        kept: How often it kept its factors.
        failed: How often new factors could not be inverted.
        stopped: Whether it is no longer refreshed.
    """

    layer: str
    refreshes: int
    kept: int
    failed: int
    stopped: bool


@dataclass(frozen=True)
class Summary:
    """The run of one optimizer.

    Args:
        name: The optimizer's name.
        record: The measurements of the run.
        refreshed: The decisions of the trace rule, for each layer with curvature.
        metrics: The metrics of the task.
        unit: The name of a loss term in the plural, such as images.
        stop_at: Value of the primary metric at which the training was to end, if any.
    """

    name: str
    record: History
    refreshed: tuple[Refreshed, ...]
    metrics: Sequence[Metric]
    unit: str
    stop_at: float | None = None

    @property
    def ended_at_target(self) -> bool:
        """Whether the last evaluation reached the value at which the training was to end."""
        return self.stop_at is not None and self.record.evaluations[-1].reaches(self.stop_at)


def refreshed_layers(optimizer: torch.optim.Optimizer, record: History) -> tuple[Refreshed, ...]:
    """Count the refreshes of each layer.

    Args:
        optimizer: Any optimizer.
        record: The record of its run.

    Returns:
        One entry for each layer with curvature; empty for first-order optimizers.
    """
    counts = Counter((point.layer, point.decision) for point in record.refreshes)
    return tuple(
        Refreshed(name, layer.refreshes, counts[name, "keep"], counts[name, "failed"], layer.stopped)
        for name, layer in curvature_of(optimizer).items()
    )


def summary_table(summaries: Sequence[Summary], targets: Sequence[float]) -> Table:
    """Make the final table, with a column for each optimizer.

    Args:
        summaries: The runs, all of the same task.
        targets: Values of the primary metric; the table gives the steps and seconds until they were reached.

    Returns:
        A table for a Rich console.
    """
    table = Table(title="Result", title_justify="left")
    table.add_column("")
    for summary in summaries:
        table.add_column(summary.name, justify="right")
    decides = primary(summaries[0].metrics)
    for target in targets:
        reached = (_reached(s.record, target) for s in summaries)
        table.add_row(f"steps (seconds) to reach {_target(decides, target)}", *reached)
    finals = [summary.record.evaluations[-1] for summary in summaries]
    shown = [metric for metric in summaries[0].metrics if metric.primary or metric.name != "loss"]
    for metric in shown:
        table.add_row(f"final {metric.title}", *(metric.text(final.metrics[metric.name]) for final in finals))
    if any(final.averaged is not None for final in finals):
        for metric in shown:
            table.add_row(f"averaged weights, {metric.title}", *(_averaged(metric, final) for final in finals))
    bests = [best for summary in summaries if (best := summary.record.best) is not None]
    table.add_row(f"best {decides.word} (its step)", *(f"{decides.text(best.value)} ({best.step})" for best in bests))
    table.add_row("steps (seconds) in total", *(f"{final.step} ({final.seconds:.1f} s)" for final in finals))
    for stop_at in sorted({s.stop_at for s in summaries if s.stop_at is not None}):
        table.add_row(
            f"ended at {_target(decides, stop_at)}", *("yes" if s.ended_at_target else "no" for s in summaries)
        )
    table.add_row(f"{summaries[0].unit} per second, ordinary steps", *(_throughput(s.record) for s in summaries))
    table.add_row("waiting for data", *(f"{s.record.waiting_share():.1%} of the time" for s in summaries))
    table.add_row("median ordinary step", *(_milliseconds(s.record, refresh=False) for s in summaries))
    table.add_row("median refresh step", *(_milliseconds(s.record, refresh=True) for s in summaries))
    table.add_row("refresh steps", *(str(sum(p.refresh for p in s.record.steps)) for s in summaries))
    skipped = [_skipped(summary.record) for summary in summaries]
    if any(skipped):
        table.add_row("steps skipped (float16 overflow)", *map(str, skipped))
    table.add_row("layers refreshed, of those due", *(_refreshes(s) for s in summaries))
    table.add_row("layers stopped", *(_stopped(s.refreshed) for s in summaries))
    return table


def refresh_table(summary: Summary) -> Table:
    """Make a table of the decisions of the trace rule per layer.

    Args:
        summary: A run with curvature.

    Returns:
        A table for a Rich console.
    """
    table = Table("layer", title=f"What {summary.name} refreshed", title_justify="left")
    for column in ("refreshes", "kept", "failed"):
        table.add_column(column, justify="right")
    table.add_column("stopped")
    for layer in summary.refreshed:
        counts = (str(layer.refreshes), str(layer.kept), str(layer.failed))
        table.add_row(cell(layer.layer), *counts, "yes" if layer.stopped else "no")
    return table


def as_json(summary: Summary, targets: Sequence[float]) -> Mapping[str, Any]:
    """Return the results of a run as JSON values, for `summary.json`.

    Args:
        summary: The run.
        targets: Values of the primary metric; the result has the steps and seconds until they were reached.

    Returns:
        A mapping of JSON values.
    """
    record, final, best = summary.record, summary.record.evaluations[-1], summary.record.best
    reached = {str(target): record.first_reaching(target) for target in targets}
    return {
        "optimizer": summary.name,
        "steps": final.step,
        "seconds": final.seconds,
        **final.metrics,
        **{f"{AVERAGED}{name}": value for name, value in (final.averaged or dict.fromkeys(final.metrics)).items()},
        "best": best and {"step": best.step, best.primary: best.value},
        "stop_at": summary.stop_at,
        "ended_at_target": summary.ended_at_target,
        "targets": {key: point and {"steps": point.step, "seconds": point.seconds} for key, point in reached.items()},
        f"{summary.unit}_per_second": record.median_terms_per_second(),
        "waiting_for_data": record.waiting_share(),
        "skipped_steps": _skipped(record),
        "ordinary_step_seconds": record.median_duration(refresh=False),
        "refresh_step_seconds": record.median_duration(refresh=True),
        "refreshed": {item.layer: _counts(item) for item in summary.refreshed},
    }


def _counts(item: Refreshed) -> dict[str, int | bool]:
    return {"refreshes": item.refreshes, "kept": item.kept, "failed": item.failed, "stopped": item.stopped}


def _reached(record: History, target: float) -> str:
    point = record.first_reaching(target)
    return f"{point.step} ({point.seconds:.1f} s)" if point else "not reached"


def _milliseconds(record: History, *, refresh: bool) -> str:
    seconds = record.median_duration(refresh=refresh)
    return "none" if seconds is None else f"{1000 * seconds:.1f} ms"


def _target(metric: Metric, value: float) -> str:
    if not metric.share:
        return f"{metric.word} {value:.6g}"
    text = f"{100 * value:.4g}"  # a target such as 75.97% is not rounded
    return f"{text}%" if "." in text else f"{text}.0%"


def _averaged(metric: Metric, final: EvalPoint) -> str:
    return "none" if final.averaged is None else metric.text(final.averaged[metric.name])


def _throughput(record: History) -> str:
    rate = record.median_terms_per_second()
    return "unknown" if rate is None else f"{rate:.4g}"


def _skipped(record: History) -> int:
    return sum(point.skipped for point in record.steps)


def _refreshes(summary: Summary) -> str:
    due = len(summary.record.refreshes)
    return f"{sum(layer.refreshes for layer in summary.refreshed)} of {due}" if due else "none"


def _stopped(refreshed: Sequence[Refreshed]) -> str:
    return f"{sum(layer.stopped for layer in refreshed)} of {len(refreshed)}" if refreshed else "none"
