"""Reads the times of a run from the raw data of a figure, and formats them."""

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from torch_thor.bench.figures.measuring import from_columns


def processor_time_counts(settings: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Return whether a figure shows processor time instead of wall-clock time.

    On one thread of a CPU, processor time is the wall-clock time on an otherwise idle machine.

    Args:
        settings: Settings with the key `device`.
        machine: The description of the machine in the raw data.

    Returns:
        True for one thread of a CPU, else False.
    """
    return bool(settings["device"] == "cpu" and machine["threads"] == 1)


def seconds_of(run: Mapping[str, Any], *, processor: bool) -> list[float]:
    """Return the time at the end of each step.

    Args:
        run: A run of the raw data.
        processor: Whether to return processor time; otherwise wall-clock time. Both are of training steps alone.

    Returns:
        The seconds from the start of the training, one number per step.
    """
    return list(run["processor_seconds"] if processor else run["steps"]["seconds"])


def median_step(run: Mapping[str, Any], *, refresh: bool, processor: bool) -> float | None:
    """Return the median time of a step.

    Args:
        run: A run of the raw data.
        refresh: Whether to use the steps with a refresh; otherwise those without.
        processor: As for `seconds_of`.

    Returns:
        The median in seconds; `None` if there are no such steps.
    """
    took = [after - before for before, after in itertools.pairwise([0.0, *seconds_of(run, processor=processor)])]
    chosen = [time for time, was in zip(took, run["steps"]["refresh"], strict=True) if was == refresh]
    return statistics.median(chosen) if chosen else None


def step_to(run: Mapping[str, Any], target: float) -> int | None:
    """Return the step at which a run reaches a target.

    Args:
        run: A run of the raw data.
        target: A value of the primary metric of the run's evaluations.

    Returns:
        The step of the first evaluation that reaches the target; `None` if no evaluation does.
    """
    point = from_columns(run).first_reaching(target)
    return None if point is None else point.step


def epochs_to(run: Mapping[str, Any], target: float) -> float | None:
    """Return the epochs that a run takes to reach a target.

    Args:
        run: As for `step_to`.
        target: As for `step_to`.

    Returns:
        The epochs from the start of the training, with their fraction; `None` if no evaluation reaches the target.
    """
    step = step_to(run, target)
    return None if step is None else float(step / run["steps_per_epoch"])


def seconds_to(run: Mapping[str, Any], target: float, *, processor: bool) -> float | None:
    """Return the time that a run takes to reach a target.

    Args:
        run: As for `step_to`.
        target: As for `step_to`.
        processor: As for `seconds_of`.

    Returns:
        The seconds from the start of the training to the end of the step; `None` if no evaluation reaches the target.
    """
    step = step_to(run, target)
    return None if step is None else seconds_of(run, processor=processor)[step - 1]


def time_unit(*, processor: bool) -> str:
    """Return what the times of a figure are, for a table or an axis.

    Args:
        processor: As for `seconds_of`.

    Returns:
        The unit, and what is timed.
    """
    return "processor seconds of training steps (one thread)" if processor else "seconds of training steps"


def milliseconds(runs: Iterable[Mapping[str, Any]], *, refresh: bool, processor: bool) -> str:
    """Format the time of a step, the mean over runs of their medians.

    Args:
        runs: Runs of the raw data.
        refresh: As for `median_step`.
        processor: As for `seconds_of`.

    Returns:
        The time in milliseconds with its unit; `none` if no run has such a step.
    """
    times = [median_step(run, refresh=refresh, processor=processor) for run in runs]
    known = [seconds for seconds in times if seconds is not None]
    return f"{1000 * statistics.fmean(known):.0f} ms" if known else "none"
