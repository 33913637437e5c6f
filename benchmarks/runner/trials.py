"""Learning rates that are tried: three a factor of two apart, then more beyond the nearer end."""

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.runner.stores import key_of

Job = dict[str, Any]
Rows = Mapping[str, Mapping[str, Any]]


def rates_around(
    rows: Rows, setting: Job, middle: float, *, count: int, higher: bool = False
) -> list[Job]:
    """Return the trials of a setting, as far as they are known.

    Args:
        rows: The results so far.
        setting: What the trials share.
        middle: The middle of the first three learning rates.
        count: The number of trials.
        higher: Whether a higher value is better.

    Returns:
        A job for each trial, in the order in which they run.
    """
    rates, tried = [middle / 2, middle, 2 * middle], list[Job]()
    while True:
        new = [{**setting, "lr": float(f"{rate:.4g}")} for rate in rates]
        tried += new
        if len(tried) == count or any(key_of(job) not in rows for job in new):
            return tried
        ordered = sorted(tried, key=lambda job: job["lr"])
        at = min(range(len(ordered)), key=lambda i: badness(rows, ordered[i], higher=higher))
        is_lower = at < len(ordered) / 2
        rates = [ordered[0]["lr"] / 2 if is_lower else 2 * ordered[-1]["lr"]]


def badness(rows: Rows, job: Job, *, higher: bool = False) -> float:
    """Return the value of a run, with a sign that makes lower better; infinite if it diverged."""
    value = rows[key_of(job)]["value"]
    if value is None:
        return math.inf
    return -value if higher else value


def best_of(rows: Rows, tried: list[Job], *, count: int, higher: bool = False) -> Job | None:
    """Return the best setting of all trials, without its seed; None until all are there."""
    if len(tried) < count or any(key_of(job) not in rows for job in tried):
        return None
    best = min(tried, key=lambda job: badness(rows, job, higher=higher))
    return {key: value for key, value in best.items() if key != "seed"}


def shown(rows: Rows, tried: list[Job], names: tuple[str, ...] = ("lr",)) -> str:
    """Return the values of the trials that have run, by what is tuned, for a cell."""
    known = [job for job in tried if key_of(job) in rows]
    cells = []
    for job in sorted(known, key=lambda job: [job.get(name, 0.0) for name in names]):
        value = rows[key_of(job)]["value"]
        options = " / ".join(f"{job[name]:g}" for name in names if name in job)
        cells.append(f"{options}: {math.inf if value is None else value:.3f}")
    return ", ".join(cells)
