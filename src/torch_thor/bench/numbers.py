"""Statistics of runs: running means, and steps to a target."""

import statistics
from collections.abc import Iterable, Sequence


def steps_to(
    evaluations: Iterable[tuple[float, float]], target: float, *, higher: bool = True, interpolate: bool = True
) -> float | None:
    """Find when a run reaches a target.

    Args:
        evaluations: Step and figure, in order.
        target: The figure to reach.
        higher: Whether a higher figure is better.
        interpolate: Whether to go by the straight line between two evaluations; else the step of the evaluation counts.

    Returns:
        The first such step; `None` if there is none.
    """
    sign = 1 if higher else -1
    before: tuple[float, float] | None = None
    for step, value in evaluations:
        if sign * (value - target) >= 0:
            if not interpolate or before is None or before[1] == value:
                return float(step)
            return before[0] + (step - before[0]) * (target - before[1]) / (value - before[1])
        before = (step, value)
    return None


def running_mean(values: Sequence[float], before: int) -> list[float]:
    """Smooth a series.

    Args:
        values: One number per step.
        before: How many steps before each one its mean takes in.

    Returns:
        As many numbers: at the start the mean takes in what there is.
    """
    return [statistics.fmean(values[max(0, i - before) : i + 1]) for i in range(len(values))]
