"""What a run measured: the loss of each step, the layers it refreshed, the accuracy at each evaluation, and when.

`seconds` is time spent in training steps alone: evaluations, checkpoints and reports are not in it.
"""

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class StepPoint:
    """One optimizer step (counted from 1).

    `loss` and `images` are over all processes. `duration` is in seconds, with the `waited` for data in it. `damping` is
    `None` for optimizers without. `skipped`: a float16 gradient overflowed, and the weights stayed.
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
KINDS: dict[str, type[Point]] = {
    "step": StepPoint,
    "refresh": RefreshPoint,
    "eval": EvalPoint,
}  # within a step, in order


@dataclass
class Record:
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

    def median_duration(self, *, refresh: bool) -> float | None:
        """The median seconds of a step.

        Args:
            refresh: Whether to look at the steps that refreshed curvature, or at the others.

        Returns:
            Seconds, or `None` if there were no such steps.
        """
        durations = [point.duration for point in self.steps if point.refresh == refresh]
        return median(durations) if durations else None

    def up_to(self, step: int) -> "Record":
        """The part of the record that a checkpoint at `step` knows.

        Args:
            step: Optimizer steps done.

        Returns:
            A record without the later points.
        """
        return Record(
            [p for p in self.steps if p.step <= step],
            [p for p in self.evaluations if p.step <= step],
            [p for p in self.refreshes if p.step <= step],
        )

    def points(self) -> list[Point]:
        """Everything in the order in which it happened.

        Returns:
            For each step its own point, then its refreshes, then its evaluation.
        """
        order = {kind: place for place, kind in enumerate(KINDS.values())}
        points: list[Point] = [*self.steps, *self.refreshes, *self.evaluations]
        return sorted(points, key=lambda point: (point.step, order[type(point)]))


def to_line(point: Point) -> dict[str, Any]:
    """A point as it stands in `metrics.jsonl`.

    Args:
        point: A step, a refresh of a layer or an evaluation.

    Returns:
        A flat mapping with a `kind` first.
    """
    kind = next(name for name, cls in KINDS.items() if isinstance(point, cls))
    return {"kind": kind, **asdict(point)}


def from_lines(lines: list[dict[str, Any]]) -> Record:
    """Rebuild a record from the lines of `metrics.jsonl`.

    Args:
        lines: What `to_line` made, in order.

    Returns:
        The record.
    """
    record = Record()
    lists: dict[str, list[Any]] = {
        "step": record.steps,
        "refresh": record.refreshes,
        "eval": record.evaluations,
    }
    for line in lines:
        kind = line["kind"]
        lists[kind].append(KINDS[kind](**{key: value for key, value in line.items() if key != "kind"}))
    return record
