"""What a run measured: the loss of each step, the layers it refreshed, the accuracy at each evaluation, and when.

`seconds` is time spent in training steps alone: evaluations, checkpoints and reports are not in it.
"""

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, TypeVar


@dataclass(frozen=True)
class StepPoint:
    """One optimizer step (counted from 1).

    `loss` and `images` are over all processes; `images` is 0 where an older version did not count. `duration` is in
    seconds, with the `waited` for data in it. `damping` is `None` for optimizers without. `skipped`: a float16 gradient
    overflowed, and the weights stayed; such a step alone may have a `loss` that is not finite.
    """

    step: int
    loss: float
    lr: float
    seconds: float
    duration: float
    refresh: bool
    images: int = 0
    waited: float = 0.0
    damping: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation on the test set, after `step` steps; `averaged_...`: of the averaged weights, if there are any."""

    step: int
    seconds: float
    loss: float
    top1: float
    top5: float
    averaged_loss: float | None = None
    averaged_top1: float | None = None
    averaged_top5: float | None = None

    @property
    def accuracy(self) -> float:
        """Top-1 of what would be used: of the averaged weights where there are any."""
        return self.top1 if self.averaged_top1 is None else self.averaged_top1


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
        """The first evaluation whose accuracy (top-1) is at least `target`.

        Args:
            target: An accuracy in [0, 1].

        Returns:
            The evaluation, or `None` if the run never got there.
        """
        return next((point for point in self.evaluations if point.accuracy >= target), None)

    @property
    def best(self) -> EvalPoint | None:
        """The evaluation of the highest accuracy, the first of equals; `None` before the first."""
        return max(self.evaluations, key=lambda point: point.accuracy, default=None)

    def median_images_per_second(self) -> float | None:
        """The median throughput of steps that refreshed nothing, waiting for data included.

        Returns:
            Images a second, or `None` if no such step is known.
        """
        rates = [p.images / p.duration for p in self.steps if not p.refresh and p.images and p.duration]
        return median(rates) if rates else None

    def waiting_share(self) -> float:
        """How much of the steps' time went by waiting for data.

        Returns:
            A share in [0, 1].
        """
        seconds = sum(point.duration for point in self.steps)
        return sum(point.waited for point in self.steps) / seconds if seconds else 0.0

    def median_duration(self, *, refresh: bool) -> float | None:
        """The median seconds of a step.

        Args:
            refresh: Whether to look at the steps that refreshed curvature, or at the others.

        Returns:
            Seconds, or `None` if there were no such steps.
        """
        durations = [point.duration for point in self.steps if point.refresh == refresh]
        return median(durations) if durations else None

    def up_to(self, step: int) -> "History":
        """The part of the record that a checkpoint at `step` knows.

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
        """The part of the record that is newer than a step.

        Args:
            step: Optimizer steps done.

        Returns:
            A record of the later points; it costs no more than they are many.
        """
        return History(_after(self.steps, step), _after(self.evaluations, step), _after(self.refreshes, step))

    def points(self) -> list[Point]:
        """Everything in the order in which it happened.

        Returns:
            For each step its own point, then its refreshes, then its evaluation.
        """
        order = {kind: place for place, kind in enumerate(KINDS.values())}
        points: list[Point] = [*self.steps, *self.refreshes, *self.evaluations]
        return sorted(points, key=lambda point: (point.step, order[type(point)]))


def _after(points: list[Kind], step: int) -> list[Kind]:
    return points[bisect_right(points, step, key=lambda point: point.step) :]


def to_line(point: Point) -> dict[str, Any]:
    """A point as it stands in `metrics.jsonl`.

    Args:
        point: A step, a refresh of a layer or an evaluation.

    Returns:
        A flat mapping with a `kind` first; numbers that are not finite are `None`, because JSON has no word for them.
    """
    kind = next(name for name, cls in KINDS.items() if isinstance(point, cls))
    return {"kind": kind, **{key: _plain(value) for key, value in asdict(point).items()}}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_lines(lines: list[dict[str, Any]]) -> History:
    """Rebuild a record from the lines of `metrics.jsonl`.

    Args:
        lines: What `to_line` made, in order; of this version or an older one, whose points had fewer fields.

    Returns:
        The record.
    """
    record = History()
    lists: dict[str, list[Any]] = {
        "step": record.steps,
        "refresh": record.refreshes,
        "eval": record.evaluations,
    }
    for line in lines:
        kind = line["kind"]
        values = {key: value for key, value in line.items() if key != "kind"}
        if kind != "refresh" and values["loss"] is None:
            values["loss"] = math.nan
        lists[kind].append(KINDS[kind](**values))
    return record
