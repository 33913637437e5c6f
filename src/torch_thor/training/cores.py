"""The CPU cores that this process may use."""

import os


def allowed_cores() -> int:
    """Return their number: those of `taskset` or a job scheduler, not all of the machine."""
    is_known = hasattr(os, "sched_getaffinity")  # on Linux
    return len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1
