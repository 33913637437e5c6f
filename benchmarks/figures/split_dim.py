"""The curves of performance and information over the split dimension, and their crossing.

See Chen et al. 2021, section 3.3.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from benchmarks.figures.training import Options, Row
from benchmarks.runner import markdown
from torch_thor.errors import require
from torch_thor.split import SplitChoice, choose_split_dim
from torch_thor.tools.split_dim import draw_choice, load_subject, sample_images, verdict
from torch_thor.training.parallel import device_of

ABOUT = "the split dimension: falling performance, rising information, the crossing"
TAKES = ("model", "pixels")
THEIRS = "theirs, on an Ascend 910 (section 3.3): crossing at 106, split_dim=128"


def jobs(options: Options, device: str) -> list[Row]:
    """List the measurement."""
    own = {
        "model": options.get("model", "resnet50"),
        "batch": 32,
        "pixels": options.get("pixels", 224),
        "seed": 0,
    }
    require(own["pixels"] >= 1, f"--pixels {own['pixels']}: give 1 or more")
    return [{**own, "device": str(device_of(device))}]


def run(job: Row) -> Row:
    """Measure spectral losses and inversion times on one thread, as `torch-thor split-dim` does."""
    torch.set_num_threads(1)
    subject = load_subject(job["model"], job["seed"])
    batch = subject.batch
    if batch is None:
        batch = sample_images(job["batch"], job["pixels"], None, job["seed"])
    choice = choose_split_dim(
        subject.model, batch, device_of(job["device"]), loss_fn=subject.loss_fn, optimizer="thor"
    )
    return {**job, "optimizer": "thor", "data": None, **choice.as_dict()}


def optimizers(job: Row) -> list[str]:
    """Name the optimizer whose factors are split."""
    return ["THOR"]


def _choice(rows: Sequence[Row]) -> SplitChoice:
    return SplitChoice(**{item.name: rows[0][item.name] for item in fields(SplitChoice)})


def table(rows: Sequence[Row]) -> str:
    """Return both curves."""
    choice, lines = _choice(rows), []
    for size, kept, speed in zip(
        choice.candidates, choice.information, choice.performance, strict=True
    ):
        lines.append(
            (
                f"**{size}**" if size == choice.split_dim else str(size),
                f"{kept:.1%}",
                f"{speed:.3f}",
            )
        )
    heads = ("block size s", "factors that lose < 1 %", "p_1 / p_s")
    return f"{markdown.table(heads, lines)}\n\n{verdict(choice)} ({THEIRS})."


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw both curves, with the measured crossing."""
    draw_choice(_choice(rows), rows[0]["job"]["model"], path)
