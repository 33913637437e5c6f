"""Throughput over some steps of a training, and the share of their time that was spent waiting for data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from torch_thor.training.engine.history import StepPoint


@dataclass(frozen=True)
class Throughput:
    """What a stretch of steps was like.

    `loss` is the mean of those that are finite. `terms_per_second` counts the time of all its steps, waiting and
    refreshes included, but no evaluation; `None` where loss terms were not counted. `ordinary_seconds` and
    `refresh_seconds` are medians a step, of the steps without and with a refresh; `None` where there was none.
    `waited_seconds` is a mean a step, `waiting` the share of the time that went by waiting for data.
    """

    loss: float | None
    terms_per_second: float | None
    ordinary_seconds: float | None
    refresh_seconds: float | None
    waited_seconds: float
    waiting: float


def throughput(points: Sequence[StepPoint]) -> Throughput:
    """Sum up a stretch of steps.

    Args:
        points: One step or more.

    Returns:
        What they were like.
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
