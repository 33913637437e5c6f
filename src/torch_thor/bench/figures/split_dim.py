"""The curves of performance and information over the split dimension, and their crossing (Chen et al. 2021, 3.3)."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from torch_thor.bench import markdown
from torch_thor.bench.figures import paper
from torch_thor.bench.figures.figure import Figure, Options
from torch_thor.bench.figures.raw import RawData
from torch_thor.split.choice import SplitChoice
from torch_thor.tools.split_dim import draw_choice, measure_split_dim, verdict
from torch_thor.training.errors import require

MODEL, BATCH, PIXELS, SEED = "resnet50", 32, 224, 0


def settings(options: Options, device: str) -> dict[str, Any]:
    """Return the settings of the figure.

    Args:
        options: The user's options.
        device: The device to measure on.

    Returns:
        JSON values.
    """
    pixels = PIXELS if options.pixels is None else options.pixels
    require(pixels >= 1, f"--pixels {pixels}: give 1 or more")
    return {
        "model": options.model or MODEL,
        "batch": BATCH,
        "pixels": pixels,
        "seed": SEED,
        "device": device,
    }


def jobs(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of the figure, of which there is one.

    Args:
        settings: The settings of the figure.

    Returns:
        The model of the run.
    """
    return [{"model": settings["model"]}]


def measure(settings: Mapping[str, Any], job: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Measure spectral losses and times of inversion, as `torch-thor split-dim` does.

    Args:
        settings: The settings of the figure.
        job: The model.
        console: The console that shows progress.

    Returns:
        The choice and the measurements from which it was made.
    """
    own = {key: settings[key] for key in ("device", "batch", "pixels", "seed")}
    _, numbers = measure_split_dim(job["model"], console, data=None, **own)
    return numbers


def _choice(raw: RawData) -> SplitChoice:
    return SplitChoice(**{item.name: raw.runs[0][item.name] for item in fields(SplitChoice)})


def table(raw: RawData) -> str:
    """Return both curves as a table.

    Args:
        raw: Complete raw data.

    Returns:
        The table, and what the paper reports, in Markdown.
    """
    choice = _choice(raw)
    rows = []
    for size, kept, speed in zip(choice.candidates, choice.information, choice.performance, strict=True):
        mark = "**" if size == choice.split_dim else ""
        rows.append((f"{mark}{size}{mark}", f"{kept:.1%}", f"{speed:.3f}"))
    text = markdown.table(("block size s", "factors that lose < 1 %", "p_1 / p_s"), rows)
    return "\n".join([text, "", f"{verdict(choice)}.", "", f"Theirs: {paper.SPLIT_NOTE}."])


def draw(raw: RawData, path: Path) -> None:
    """Draw both curves, with the measured crossing and that of the paper.

    Args:
        raw: Complete raw data.
        path: The PNG file to write.
    """
    elsewhere = {paper.SPLIT_LABEL: paper.SPLIT_CROSSING}
    draw_choice(_choice(raw), raw.settings["model"], path, elsewhere)


SPLIT_DIM = Figure(
    about="the split dimension: falling performance, rising information, the crossing",
    takes=("model", "pixels"),
    settings=settings,
    jobs=jobs,
    measure=measure,
    draw=draw,
    table=table,
)
