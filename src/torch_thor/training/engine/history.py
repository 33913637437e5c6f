"""What a run measured: the loss of each step, the layers it refreshed, the metrics of each evaluation, and when.

`seconds` is time spent in training steps alone: evaluations, checkpoints and reports are not in it.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, TypeVar

AVERAGED = "averaged_"  # before the names of metrics of the averaged weights, in files
OLD_PRIMARY = "top1"  # of evaluations written by versions that knew one task, image classification


@dataclass(frozen=True)
class StepPoint:
    """One optimizer step (counted from 1).

    `loss` and `terms` (loss terms, such as images) are over all processes; `terms` is 0 where an older version did not
    count. `duration` is in seconds, with the `waited` for data in it. `damping` is `None` for optimizers without.
    `skipped`: a float16 gradient overflowed, and the weights stayed; such a step alone may have a `loss` that is not
    finite.
    """

    step: int
    loss: float
    lr: float
    seconds: float
    duration: float
    refresh: bool
    terms: int = 0
    waited: float = 0.0
    damping: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation, after `step` steps; each metric is an attribute too: `point.loss`, `point.averaged_loss`.

    `metrics` are those of the weights, `averaged` those of the averaged weights, if there are any, both by name.
    `primary` is the metric that decides what is better.
    """

    step: int
    seconds: float
    metrics: Mapping[str, float]
    averaged: Mapping[str, float] | None = None
    primary: str = OLD_PRIMARY
    higher_is_better: bool = True

    def __getattr__(self, name: str) -> Any:
        """Return a metric by its name; `None` for a metric of averaged weights where there are none."""
        if name.startswith("_") or name in self.__dataclass_fields__:  # what copies ask for before there are any
            raise AttributeError(name)
        own = name.removeprefix(AVERAGED)
        if own in self.metrics:
            found = self.metrics if own == name else self.averaged
            return None if found is None else found[own]
        raise AttributeError(f"this evaluation has no {name}: its metrics are {', '.join(self.metrics)}")

    @property
    def value(self) -> float:
        """The primary metric of what would be used: of the averaged weights where there are any."""
        return (self.metrics if self.averaged is None else self.averaged)[self.primary]

    def reaches(self, target: float) -> bool:
        """Tell whether the primary metric is as good as a target.

        Args:
            target: A value of that metric.

        Returns:
            True if it is that or better.
        """
        return self.value >= target if self.higher_is_better else self.value <= target

    @property
    def quality(self) -> float:
        """The primary metric in a form whose larger values are better; what is no number is worst."""
        if math.isnan(self.value):
            return -math.inf
        return self.value if self.higher_is_better else -self.value


@dataclass(frozen=True)
class RefreshPoint:
    """What the step `step` (counted from 1) decided about one layer's curvature.

    `decision` is `update`, `keep`, `stop` or `failed`; `trace_change` is Δ, `None` where there was nothing to compare
    with; `trace` is tr(F + λI) of the new statistics, `None` if it was not finite.
    """

    step: int
    layer: str
    decision: str
    trace_change: float | None
    trace: float | None


Point = StepPoint | RefreshPoint | EvalPoint
Kind = TypeVar("Kind", StepPoint, RefreshPoint, EvalPoint)
KINDS: dict[str, type[Point]] = {
    "step": StepPoint,
    "refresh": RefreshPoint,
    "eval": EvalPoint,
}  # within a step, in order


@dataclass
class History:
    """The points of one run, in order."""

    steps: list[StepPoint] = field(default_factory=list)
    evaluations: list[EvalPoint] = field(default_factory=list)
    refreshes: list[RefreshPoint] = field(default_factory=list)

    def first_reaching(self, target: float) -> EvalPoint | None:
        """Return the first evaluation whose primary metric is `target` or better.

        Args:
            target: A value of that metric.

        Returns:
            The evaluation, or `None` if the run never got there.
        """
        return next((point for point in self.evaluations if point.reaches(target)), None)

    @property
    def best(self) -> EvalPoint | None:
        """The evaluation with the best value of the primary metric, the first of equals; `None` before the first."""
        return max(self.evaluations, key=lambda point: point.quality, default=None)

    def median_terms_per_second(self) -> float | None:
        """Return the median throughput of steps that refreshed nothing, waiting for data included.

        Returns:
            Loss terms per second, or `None` if no such step is known.
        """
        rates = [p.terms / p.duration for p in self.steps if not p.refresh and p.terms and p.duration]
        return median(rates) if rates else None

    def waiting_share(self) -> float:
        """Compute the share of the steps' time that was spent waiting for data.

        Returns:
            A share in [0, 1].
        """
        seconds = sum(point.duration for point in self.steps)
        return sum(point.waited for point in self.steps) / seconds if seconds else 0.0

    def median_duration(self, *, refresh: bool) -> float | None:
        """Return the median seconds of a step.

        Args:
            refresh: Whether to look at the steps that refreshed curvature, or at the others.

        Returns:
            Seconds, or `None` if there were no such steps.
        """
        durations = [point.duration for point in self.steps if point.refresh == refresh]
        return median(durations) if durations else None

    def up_to(self, step: int) -> "History":
        """Return the part of the record that a checkpoint at `step` knows.

        Args:
            step: Optimizer steps done.

        Returns:
            A record without the later points.
        """
        return History(
            [p for p in self.steps if p.step <= step],
            [p for p in self.evaluations if p.step <= step],
            [p for p in self.refreshes if p.step <= step],
        )

    def since(self, step: int) -> "History":
        """Return the part of the record that is newer than a step.

        Args:
            step: Optimizer steps done.

        Returns:
            A record of the later points; it costs no more than they are many.
        """
        return History(_after(self.steps, step), _after(self.evaluations, step), _after(self.refreshes, step))

    def points(self) -> list[Point]:
        """Return everything in the order in which it happened.

        Returns:
            For each step its own point, then its refreshes, then its evaluation.
        """
        order = {kind: place for place, kind in enumerate(KINDS.values())}
        points: list[Point] = [*self.steps, *self.refreshes, *self.evaluations]
        return sorted(points, key=lambda point: (point.step, order[type(point)]))


def _after(points: list[Kind], step: int) -> list[Kind]:
    return points[bisect_right(points, step, key=lambda point: point.step) :]


def to_line(point: Point) -> dict[str, Any]:
    """Write a point as a line of `metrics.jsonl`.

    Args:
        point: A step, a refresh of a layer or an evaluation.

    Returns:
        A flat mapping with a `kind` first; numbers that are not finite are `None`, because JSON has no word for them.
    """
    kind = next(name for name, cls in KINDS.items() if isinstance(point, cls))
    return {"kind": kind, **{key: _plain(value) for key, value in _flat(point).items()}}


def _flat(point: Point) -> dict[str, Any]:
    if not isinstance(point, EvalPoint):
        return asdict(point)
    averaged = point.averaged or dict.fromkeys(point.metrics)
    return {
        "step": point.step,
        "seconds": point.seconds,
        **point.metrics,
        **{f"{AVERAGED}{name}": value for name, value in averaged.items()},
        "primary": point.primary,
        "higher_is_better": point.higher_is_better,
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_lines(lines: list[dict[str, Any]]) -> History:
    """Rebuild a history from the lines of `metrics.jsonl`.

    Args:
        lines: What `to_line` made, in order; of this version or an older one, whose points had fewer fields.

    Returns:
        The history.
    """
    history = History()
    lists: dict[str, list[Any]] = {
        "step": history.steps,
        "refresh": history.refreshes,
        "eval": history.evaluations,
    }
    for line in lines:
        kind = line["kind"]
        lists[kind].append(_point(kind, {key: value for key, value in line.items() if key != "kind"}))
    return history


def _point(kind: str, values: dict[str, Any]) -> Point:
    if kind == "eval":
        return _evaluation(values)
    if kind == "step":
        if "images" in values:  # what older versions counted
            values["terms"] = values.pop("images")
        values["loss"] = _number(values["loss"])
    return KINDS[kind](**values)


def _evaluation(values: dict[str, Any]) -> EvalPoint:
    own = {item.name: values.pop(item.name) for item in fields(EvalPoint) if item.name in values}
    averaged = {key.removeprefix(AVERAGED): values.pop(key) for key in list(values) if key.startswith(AVERAGED)}
    metrics = {name: _number(value) for name, value in values.items()}
    point = EvalPoint(**own, metrics=metrics)
    if point.primary not in metrics or "loss" not in metrics:
        raise KeyError(point.primary if "loss" in metrics else "loss")
    there = averaged.get(point.primary) is not None or averaged.get("loss") is not None
    found = {name: _number(value) for name, value in averaged.items()} if there else None
    return EvalPoint(**own, metrics=metrics, averaged=found)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def to_columns(kind: str, points: Sequence[Point], metrics: Sequence[str]) -> dict[str, list[Any]]:
    """Write points of one kind as a list for each field, which is much smaller than a mapping for each point.

    Args:
        kind: A key of `KINDS`.
        points: Points of that kind.
        metrics: Names of the metrics of evaluations, which have their columns where there are no points too.

    Returns:
        Field or metric -> values in order, as they are.
    """
    rows = [_flat(point) for point in points]
    if kind == "eval":
        names = [*_flat(EvalPoint(0, 0.0, dict.fromkeys(metrics, 0.0)))]
    else:
        names = [item.name for item in fields(KINDS[kind])]
    return {name: [row[name] for row in rows] for name in names}


def from_columns(kind: str, columns: Mapping[str, list[Any]]) -> list[Any]:
    """Rebuild points.

    Args:
        kind: A key of `KINDS`.
        columns: What `to_columns` made, of this version or an older one.

    Returns:
        The points.
    """
    return [_point(kind, dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
