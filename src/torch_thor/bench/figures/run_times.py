"""Reads the times of a run from the raw data of a figure, and formats them."""

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from torch_thor.bench.numbers import steps_to


def processor_time_counts(settings: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Return whether a figure shows processor time instead of wall-clock time."""
    return bool(settings["device"] == "cpu" and machine["threads"] == 1)


def seconds_of(run: Mapping[str, Any], *, processor: bool) -> list[float]:
    """Return the time at the end of each step."""
    return list(run["processor_seconds"] if processor else run["steps"]["seconds"])


def median_step(run: Mapping[str, Any], *, refresh: bool, processor: bool) -> float | None:
    """Return the median time of a step."""
    took = [after - before for before, after in itertools.pairwise([0.0, *seconds_of(run, processor=processor)])]
    chosen = [time for time, was in zip(took, run["steps"]["refresh"], strict=True) if was == refresh]
    return statistics.median(chosen) if chosen else None


def step_to(run: Mapping[str, Any], target: float) -> int | None:
    """Return the step at which a run reaches a target."""
    found = run["evaluations"]
    name = found.get("primary", ["top1"])[:1]  # which data that were measured earlier do not name
    if not name:
        return None
    averaged = found[f"averaged_{name[0]}"]
    values = found[name[0]] if averaged[0] is None else averaged
    higher = found.get("higher_is_better", [True])[0]
    step = steps_to(zip(found["step"], values, strict=True), target, higher=higher, interpolate=False)
    return None if step is None else int(step)


def epochs_to(run: Mapping[str, Any], target: float) -> float | None:
    """Return the epochs that a run takes to reach a target."""
    step = step_to(run, target)
    return None if step is None else float(step / run["steps_per_epoch"])


def seconds_to(run: Mapping[str, Any], target: float, *, processor: bool) -> float | None:
    """Return the time that a run takes to reach a target."""
    step = step_to(run, target)
    return None if step is None else seconds_of(run, processor=processor)[step - 1]


def time_unit(*, processor: bool) -> str:
    """Return what the times of a figure are, for a table or an axis."""
    return "processor seconds of training steps (one thread)" if processor else "seconds of training steps"


def milliseconds(runs: Iterable[Mapping[str, Any]], *, refresh: bool, processor: bool) -> str:
    """Format the time of a step, the mean over runs of their medians."""
    times = [median_step(run, refresh=refresh, processor=processor) for run in runs]
    known = [seconds for seconds in times if seconds is not None]
    return f"{1000 * statistics.fmean(known):.0f} ms" if known else "none"
