"""What a run measured: the loss of each step, the accuracy at each evaluation, and when.

`seconds` is time spent in training steps alone: evaluations, checkpoints and reports are not in it.
"""

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class StepPoint:
    """One optimizer step (counted from 1)."""

    step: int
    loss: float
    lr: float
    seconds: float
    duration: float
    refresh: bool


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation on the test set, after `step` steps."""

    step: int
    seconds: float
    loss: float
    top1: float
    top5: float


@dataclass
class Record:
    """The points of one run, in order."""

    steps: list[StepPoint] = field(default_factory=list)
    evaluations: list[EvalPoint] = field(default_factory=list)

    def first_reaching(self, target: float) -> EvalPoint | None:
        """The first evaluation whose top-1 accuracy is at least `target`.

        Args:
            target: An accuracy in [0, 1].

        Returns:
            The evaluation, or `None` if the run never got there.
        """
        return next((point for point in self.evaluations if point.top1 >= target), None)

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
        return Record([p for p in self.steps if p.step <= step], [p for p in self.evaluations if p.step <= step])


def to_line(point: StepPoint | EvalPoint) -> dict[str, Any]:
    """A point as it stands in `metrics.jsonl`.

    Args:
        point: A step or an evaluation.

    Returns:
        A flat mapping with a `kind` first.
    """
    return {"kind": "step" if isinstance(point, StepPoint) else "eval", **asdict(point)}


def from_lines(lines: list[dict[str, Any]]) -> Record:
    """Rebuild a record from the lines of `metrics.jsonl`.

    Args:
        lines: What `to_line` made, in order.

    Returns:
        The record.
    """
    record = Record()
    for line in lines:
        values = {key: value for key, value in line.items() if key != "kind"}
        if line["kind"] == "step":
            record.steps.append(StepPoint(**values))
        else:
            record.evaluations.append(EvalPoint(**values))
    return record
