"""What only a GPU can show: checks, others' trainings, times of steps and profiles.

    bash benchmarks/gpu.sh            # what is missing, in at most ten minutes, then the tables
    python -m benchmarks gpu --table

The parts, in the order in which they run:

1. checks against the reference, the CPU and a single process (checks.py);
2. CIFAR-10 with airbench94 (airbench.py);
3. step times of ResNet-50 (224 pixels, batch 256) and BERT-base (128 tokens, batch 64) in bfloat16,
   as in step_time.py;
4. profiles of the same networks and of GPT-2 (1024 tokens, batch 8): kernels and synchronisations,
   memory and times, beside torch's fused AdamW and Muon (profiles.py);
5. Shakespeare with nanoGPT (nanogpt.py).

A part whose files are missing is left out. At the end one table has the times of steps and the
results on others' code. The files gpu-h200.md and gpu-h200.json in benchmarks/results have these
parts from an H200.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu import airbench, checks, nanogpt, profiles, step_times
from benchmarks.runner.machine import DEVICE
from benchmarks.runner.markdown import table as markdown
from torch_thor.errors import require

CHECKS, AIRBENCH, TIMES = "Checks", "CIFAR-10 with airbench94", "Step times"
PROFILES, NANOGPT = "Profiles", "Shakespeare with nanoGPT"
EPOCHS = 8  # of airbench94, in the one table
COLUMNS = {  # the names that an optimizer has in profiles and in the trainings
    "AdamW": ("AdamW, fused", "AdamW"),
    "Muon": ("Muon, AdamW fused", "Muon + SGD"),
    "THOR": ("THOR",),
    "ThorMuon": ("ThorMuon",),
}
Row = dict[str, Any]
Job = dict[str, Any]
PARTS: dict[str, Any] = {
    CHECKS: checks,
    AIRBENCH: airbench,
    TIMES: step_times,
    PROFILES: profiles,
    NANOGPT: nanogpt,
}


def jobs(rows: Mapping[str, Row]) -> list[Job]:
    """List the jobs of the parts whose files are there."""
    require(DEVICE.type == "cuda", "no CUDA device is visible to torch")
    return [
        {"part": title, **job, "alone": True}
        for title, part in PARTS.items()
        if not missing(part)
        for job in part.jobs()
    ]


def missing(part: Any) -> list[Any]:
    """Return the files that a part needs and that are not there."""
    return part.missing() if hasattr(part, "missing") else []


def run(job: Job) -> dict[str, Any]:
    """Run a job of a part."""
    torch.cuda.empty_cache()
    # another part may have set these
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.benchmark = False
    return PARTS[job["part"]].run(job)


def optimizers(job: Job) -> list[str]:
    """Name ours that a job trains with; where optimizers take turns, both do."""
    words = str(job.get("optimizer", "THOR ThorMuon")).split()
    return [name for name in ("THOR", "ThorMuon") if name in words]


# ---- what is shown -------------------------------------------------------------------------------


def table(rows: Mapping[str, Row]) -> str:
    """Return the tables of the parts that have run, and one table of all."""
    lines = ["The machine and the commit are in gpu.jsonl, beside each row."]
    for title, part in PARTS.items():
        own = of_part(rows, title)
        absent = ", ".join(map(str, missing(part))) if not own else ""
        shown = part.table(own) if own else f"Not run{': there is no ' if absent else ''}{absent}."
        lines += [f"## {title}", shown]
    heading = "In brackets a step with a refresh of all layers."
    return "\n\n".join([*lines, "## In one table", heading, in_one(rows)])


def of_part(rows: Mapping[str, Row], title: str) -> list[Row]:
    """Return the rows of a part."""
    return [row for row in rows.values() if row["job"]["part"] == title]


def in_one(rows: Mapping[str, Row]) -> str:
    """Return times of steps, and results on others' code, by optimizer."""
    lines = [times(row) for row in of_part(rows, PROFILES)]
    airbench = [row for row in of_part(rows, AIRBENCH) if row["job"]["epochs"] == EPOCHS]
    title = f"airbench94, {EPOCHS} epochs"
    lines.append(results(f"{title}: accuracy", airbench, lambda row: row["tta_val_acc"], ".4f"))
    lines.append(results(f"{title}: seconds", airbench, lambda row: row["train_seconds"], ".2f"))
    texts = of_part(rows, NANOGPT)
    lowest = "nanoGPT's Shakespeare: lowest loss"
    lines.append(results(lowest, texts, lambda row: nanogpt.best(row)[1], ".4f"))
    return markdown(("work", *COLUMNS), lines)


def times(row: Row) -> list[str]:
    """Return the medians of a profiled network, in brackets those of steps with a refresh."""

    def cell(names: Iterable[str]) -> str:
        keys = [key for name in names for key in (name, f"{name}, refresh") if key in found]
        medians = [f"{statistics.median(found[key]['step_ms']):.1f}" for key in keys]
        return f"{medians[0]} ({medians[1]})" if len(medians) > 1 else "".join(medians)

    found, job = row["optimizers"], row["job"]
    title = f"{job['model']}, batch {job['batch']}: ms a step"
    return [title, *map(cell, COLUMNS.values())]


def results(title: str, rows: Sequence[Row], value: Callable[[Row], float], form: str) -> list[str]:
    """Return means over seeds."""
    cells = [title]
    for names in COLUMNS.values():
        own = [value(row) for row in rows if row["job"]["optimizer"] in names]
        cells.append(format(statistics.fmean(own), form) if own else "")
    return cells
