"""The measurements of a run: the loss of each step, the decisions of each refresh, and the metrics of each evaluation.

`seconds` is the time spent in training steps only, without evaluations, checkpoints and reports.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

AVERAGED = "averaged_"  # prefix of the metrics of the averaged weights
OLD_PRIMARY = "top1"  # the primary metric in files of versions that had only image classification


@dataclass(frozen=True)
class StepPoint:
    """The measurements of one optimizer step, over all processes.

    Args:
        step: The number of the step, from 1.
        loss: The training loss. Only in a skipped step it may be infinite or NaN.
        lr: The learning rate.
        seconds: Time of all steps so far, in seconds.
        duration: Time of this step, in seconds, with the time of waiting for data.
        refresh: Whether the step gathered statistics of the curvature.
        terms: Number of loss terms, such as images; 0 where they were not counted.
        waited: Time of waiting for data, in seconds.
        damping: The damping; `None` for optimizers without damping.
        skipped: Whether a gradient was not finite (an overflow of float16), so that the weights were not changed.
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
    """The metrics of one evaluation. Each metric is also an attribute: `point.loss`, `point.averaged_loss`.

    Args:
        step: The number of steps before the evaluation.
        seconds: Time of these steps, in seconds.
        metrics: The metrics of the weights, by name.
        averaged: The metrics of the averaged weights, by name; `None` if there are no averaged weights.
        primary: The name of the primary metric, which decides which evaluation is better.
        higher_is_better: Whether larger values of the primary metric are better.
    """

    step: int
    seconds: float
    metrics: Mapping[str, float]
    averaged: Mapping[str, float] | None = None
    primary: str = OLD_PRIMARY
    higher_is_better: bool = True

    def __getattr__(self, name: str) -> Any:
        """Return a metric by its name, or `None` for a metric of averaged weights if there are none."""
        if name.startswith("_") or name in self.__dataclass_fields__:  # `copy` looks these up before they exist
            raise AttributeError(name)
        own = name.removeprefix(AVERAGED)
        if own in self.metrics:
            found = self.metrics if own == name else self.averaged
            return None if found is None else found[own]
        raise AttributeError(f"this evaluation has no {name}: its metrics are {', '.join(self.metrics)}")

    @property
    def value(self) -> float:
        """The primary metric of the averaged weights if there are any, and of the weights otherwise."""
        return (self.metrics if self.averaged is None else self.averaged)[self.primary]

    def reaches(self, target: float) -> bool:
        """Return whether the primary metric has reached a target.

        Args:
            target: A value of that metric.

        Returns:
            True if it is equal to the target or better.
        """
        return self.value >= target if self.higher_is_better else self.value <= target

    @property
    def quality(self) -> float:
        """The primary metric with the sign that makes larger values better; NaN counts as the worst value."""
        if math.isnan(self.value):
            return -math.inf
        return self.value if self.higher_is_better else -self.value


@dataclass(frozen=True)
class RefreshPoint:
    """The decision of the trace rule about one layer on a refresh.

    Args:
        step: The number of the step, from 1.
        layer: The name of the layer.
        decision: `update`, `keep`, `stop` or `failed`.
        trace_change: Δ, the relative change of the trace; `None` if there was no earlier trace.
        trace: tr(F + λI) of the new statistics; `None` if it was not finite.
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
}  # in the order of events within a step


@dataclass
class History:
    """The points of one run, in order of time."""

    steps: list[StepPoint] = field(default_factory=list)
    evaluations: list[EvalPoint] = field(default_factory=list)
    refreshes: list[RefreshPoint] = field(default_factory=list)

    def first_reaching(self, target: float) -> EvalPoint | None:
        """Return the first evaluation whose primary metric is `target` or better.

        Args:
            target: A value of that metric.

        Returns:
            The evaluation, or `None` if the run never reached the target.
        """
        return next((point for point in self.evaluations if point.reaches(target)), None)

    @property
    def best(self) -> EvalPoint | None:
        """The first evaluation with the best value of the primary metric; `None` before the first evaluation."""
        return max(self.evaluations, key=lambda point: point.quality, default=None)

    def median_terms_per_second(self) -> float | None:
        """Return the median throughput of the steps without a refresh, including the time of waiting for data.

        Returns:
            Loss terms per second, or `None` if there is no such step.
        """
        rates = [p.terms / p.duration for p in self.steps if not p.refresh and p.terms and p.duration]
        return median(rates) if rates else None

    def waiting_share(self) -> float:
        """Compute the fraction of the steps' time that was spent waiting for data.

        Returns:
            A fraction in [0, 1].
        """
        seconds = sum(point.duration for point in self.steps)
        return sum(point.waited for point in self.steps) / seconds if seconds else 0.0

    def median_duration(self, *, refresh: bool) -> float | None:
        """Return the median duration of a step.

        Args:
            refresh: Whether to take the steps with a refresh, or those without.

        Returns:
            Seconds, or `None` if there are no such steps.
        """
        durations = [point.duration for point in self.steps if point.refresh == refresh]
        return median(durations) if durations else None

    def up_to(self, step: int) -> "History":
        """Return the part of the record up to a step.

        Args:
            step: Optimizer steps done.

        Returns:
            A record of the points up to that step.
        """
        return History(
            [p for p in self.steps if p.step <= step],
            [p for p in self.evaluations if p.step <= step],
            [p for p in self.refreshes if p.step <= step],
        )

    def since(self, step: int) -> "History":
        """Return the part of the record after a step.

        Args:
            step: Optimizer steps done.

        Returns:
            A record of the later points. The cost depends on their number only.
        """
        return History(_after(self.steps, step), _after(self.evaluations, step), _after(self.refreshes, step))

    def points(self) -> list[Point]:
        """Return all points in order of time.

        Returns:
            For each step its own point, then its refreshes, then its evaluation.
        """
        order = {kind: place for place, kind in enumerate(KINDS.values())}
        points: list[Point] = [*self.steps, *self.refreshes, *self.evaluations]
        return sorted(points, key=lambda point: (point.step, order[type(point)]))


def _after(points: list[Kind], step: int) -> list[Kind]:
    return points[bisect_right(points, step, key=lambda point: point.step) :]
