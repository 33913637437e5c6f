"""Statistics of training runs: running means, and the number of steps to a target."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def steps_to(
    evaluations: Iterable[tuple[float, float]], target: float, *, higher: bool = True, interpolate: bool = True
) -> float | None:
    """Return the step at which a run reaches a target.

    Args:
        evaluations: The step and the value of a metric at each evaluation, in order.
        target: The value to reach.
        higher: Whether a higher value is better.
        interpolate: Whether to interpolate linearly between two evaluations; otherwise that of the evaluation counts.

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


def final_accuracy(run: Mapping[str, Any]) -> float:
    """Return the accuracy at the end of a run, as the score of a search.

    Args:
        run: Raw data with ``failure`` (`None` for a complete run) and ``evaluations``, pairs of a step and an accuracy.

    Returns:
        The accuracy of the last evaluation; 0 for a run that has failed, for example because it diverged.
    """
    return 0.0 if run["failure"] else float(run["evaluations"][-1][1])


def running_mean(values: Sequence[float], before: int) -> list[float]:
    """Return the running mean of a series.

    Args:
        values: One number per step.
        before: The number of preceding steps in the mean of each step.

    Returns:
        One mean per step; at the start, over the steps that there are.
    """
    return [statistics.fmean(values[max(0, i - before) : i + 1]) for i in range(len(values))]
