"""The throughput of some steps of a training, and the fraction of their time that was spent waiting for data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from torch_thor.training.engine.history import StepPoint


@dataclass(frozen=True)
class Throughput:
    """A summary of consecutive steps.

    Args:
        loss: The mean of the finite losses; `None` if there is none.
        terms_per_second: Loss terms per second of all steps, including refreshes and the time of waiting for data;
            `None` if loss terms were not counted.
        ordinary_seconds: Median duration of the steps without a refresh; `None` if there is none.
        refresh_seconds: Median duration of the steps with a refresh; `None` if there is none.
        waited_seconds: Mean time per step of waiting for data, in seconds.
        waiting: Fraction of the time that was spent waiting for data.
    """

    loss: float | None
    terms_per_second: float | None
    ordinary_seconds: float | None
    refresh_seconds: float | None
    waited_seconds: float
    waiting: float


def throughput(points: Sequence[StepPoint]) -> Throughput:
    """Summarise consecutive steps.

    Args:
        points: One step or more.

    Returns:
        The summary.
    """
    seconds = sum(point.duration for point in points)
    terms = sum(point.terms for point in points)
    waited = sum(point.waited for point in points)
    losses = [point.loss for point in points if math.isfinite(point.loss)]
    ordinary = [point.duration for point in points if not point.refresh]
    refresh = [point.duration for point in points if point.refresh]
    return Throughput(
        loss=fmean(losses) if losses else None,
        terms_per_second=terms / seconds if terms and seconds else None,
        ordinary_seconds=median(ordinary) if ordinary else None,
        refresh_seconds=median(refresh) if refresh else None,
        waited_seconds=waited / len(points),
        waiting=waited / seconds if seconds else 0.0,
    )
