"""Statistics of training runs: running means, and the number of steps to a target."""

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy

Curve = Sequence[Sequence[float]]  # of (step, value) and perhaps more


def steps_to(
    evaluations: Iterable[tuple[float, float]], target: float, *, higher: bool = True
) -> float | None:
    """Return the step at which a run reaches a target, linear between two evaluations."""
    sign = 1 if higher else -1
    before: tuple[float, float] | None = None
    for step, value in evaluations:
        if sign * (value - target) >= 0:
            if before is None or before[1] == value:
                return float(step)
            return before[0] + (step - before[0]) * (target - before[1]) / (value - before[1])
        before = (step, value)
    return None


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """Return steps and mean values of the curves of several seeds."""
    return [
        (points[0][0], statistics.fmean(point[1] for point in points))
        for points in zip(*curves, strict=True)
    ]


def shares_until(
    curve: Sequence[tuple[float, float]],
    target: float,
    seconds: Sequence[float],
    others: Sequence[float],
    *,
    higher: bool = True,
) -> list[str]:
    """Return the shares of another's steps and seconds after which a run reaches a target.

    Args:
        curve: Steps and values of the run, which has as many steps as the other.
        target: The value.
        seconds: The seconds of the run up to each evaluation; empty if not known.
        others: The seconds of the other.
        higher: Whether a higher value is better.
    """
    there = steps_to(curve, target, higher=higher)
    if there is None:
        return ["not reached", "not reached"]
    steps = [step for step, _ in curve]
    of_steps = f"{there / steps[-1]:.2f}"
    if not seconds:
        return [of_steps, ""]
    return [of_steps, f"{float(numpy.interp(there, steps, seconds)) / others[-1]:.2f}"]


def apart(values: Sequence[float]) -> float:
    """Return how far two runs may lie apart in 19 of 20 cases, from the values of three seeds.

    A run on another device or processor has other rounding, and other masks of dropout, so it is
    as good as one with another seed. The bound is Student's, of the difference of two runs.
    """
    if len(values) != 3:
        raise ValueError(f"{len(values)} values: give those of three seeds")
    return 4.303 * statistics.stdev(values) * math.sqrt(2)
