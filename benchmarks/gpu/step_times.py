"""Step times on a GPU, in bfloat16; otherwise as in step_time.py."""

from statistics import median_high
from typing import Any

from benchmarks import step_time
from benchmarks.runner.machine import DEVICE


def jobs() -> list[dict[str, Any]]:
    """List the networks."""
    sizes = (("resnet50", 256, 224), ("bert-base", 64, 128))
    return [
        {"model": name, "batch": batch, "side": side, "rounds": 20} for name, batch, side in sizes
    ]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps on a network."""
    return step_time.measure(job["model"], DEVICE, job["batch"], job["side"], job["rounds"])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of step_time.py, and what a step of SGD takes."""
    parts = [step_time.table({row["job"]["model"]: row for row in rows})]
    for row in rows:
        took = 1000 * median_high(row["seconds"]["SGD"])
        title = f"{row['job']['model']}, batch {row['job']['batch']}"
        parts.append(f"{title}: a step of SGD takes {took:.1f} ms.")
    return "\n\n".join(parts)
