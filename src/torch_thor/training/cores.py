"""The CPU cores that this process may use."""

import os


def allowed_cores() -> int:
    """Return their number: those of `taskset` or a job scheduler, not all of the machine."""
    if hasattr(os, "sched_getaffinity"):  # of Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
