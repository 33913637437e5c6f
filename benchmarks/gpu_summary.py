"""One table of what gpu.py found: times of steps, and results on others' code, by optimizer."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.runner.markdown import table as markdown

PROFILE = "Profile of "  # how the names of these parts begin
AIRBENCH, NANOGPT, EPOCHS = "CIFAR-10 with airbench94", "Shakespeare with nanoGPT", 8
COLUMNS = {  # the names that an optimizer has in profiles and in the studies
    "AdamW": ("AdamW, fused", "AdamW"),
    "Muon": ("Muon, AdamW fused", "Muon + SGD", "Muon 0.001", "Muon 0.003"),
    "THOR": ("THOR",),
    "ThorMuon": ("ThorMuon",),
}

Row = Mapping[str, Any]


def table(found: Mapping[str, Any]) -> str:
    """Return the table of the parts that have run."""
    lines = [times(name, rows) for name, rows in found.items() if name.startswith(PROFILE)]
    airbench = [row for row in found.get(AIRBENCH, ()) if row["job"]["epochs"] == EPOCHS]
    title = f"airbench94, {EPOCHS} epochs"
    lines.append(results(f"{title}: accuracy", airbench, lambda row: row["tta_val_acc"], ".4f"))
    lines.append(results(f"{title}: seconds", airbench, lambda row: row["train_seconds"], ".2f"))
    texts = found.get(NANOGPT, ())
    lines.append(results("nanoGPT's Shakespeare: lowest loss", texts, lowest_loss, ".4f"))
    return markdown(("work", *COLUMNS), lines)


def times(part: str, rows: Mapping[str, Row]) -> list[str]:
    """Return the medians of a profiled network, in brackets those of steps with a refresh."""

    def cell(names: Iterable[str]) -> str:
        keys = [key for name in names for key in (name, f"{name}, refresh") if key in rows]
        medians = [f"{statistics.median(rows[key]['step_ms']):.1f}" for key in keys]
        return f"{medians[0]} ({medians[1]})" if len(medians) > 1 else "".join(medians)

    return [f"{part.removeprefix(PROFILE)}: ms a step", *map(cell, COLUMNS.values())]


def results(title: str, rows: Iterable[Row], value: Callable[[Row], float], form: str) -> list[str]:
    """Return means over seeds, of the better rate where Muon has two (a loss)."""
    values = defaultdict[str, list[float]](list)
    for row in rows:
        if "failure" not in row:
            values[row["job"]["optimizer"]].append(value(row))
    means = [
        [statistics.fmean(values[name]) for name in names if name in values]
        for names in COLUMNS.values()
    ]
    return [title, *(format(min(own), form) if own else "" for own in means)]


def lowest_loss(row: Row) -> float:
    """Return the lowest validation loss of a training."""
    return float(min(loss for _, loss, _ in row["curve"]))
