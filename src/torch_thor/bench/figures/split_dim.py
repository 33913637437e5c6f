"""Where falling performance meets rising information over the split dimension (Chen et al. 2021, section 3.3)."""

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
from torch_thor.training.errors import require
from torch_thor.training.reports.split_report import draw_choice, measure_split_dim, verdict

MODEL, BATCH, PIXELS, SEED = "resnet50", 32, 224, 0


def settings(options: Options, device: str) -> dict[str, Any]:
    """Choose the settings of the figure.

    Args:
        options: The user's.
        device: To measure on.

    Returns:
        Plain values.
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
    """Return the only run there is.

    Args:
        settings: What decides it.

    Returns:
        The model.
    """
    return [{"model": settings["model"]}]


def measure(settings: Mapping[str, Any], job: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Measure losses and inverse times, as `torch-thor split-dim` does.

    Args:
        settings: What decides the figure.
        job: The model.
        console: Where progress is shown.

    Returns:
        Everything that the choice was made from.
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
        Markdown, ours and theirs.
    """
    choice = _choice(raw)
    rows = []
    for size, kept, speed in zip(choice.candidates, choice.information, choice.performance, strict=True):
        mark = "**" if size == choice.split_dim else ""
        rows.append((f"{mark}{size}{mark}", f"{kept:.1%}", f"{speed:.3f}"))
    text = markdown.table(("block size s", "factors that lose < 1 %", "p_1 / p_s"), rows)
    return "\n".join([text, "", f"{verdict(choice)}.", "", f"Theirs: {paper.SPLIT_NOTE}."])


def draw(raw: RawData, path: Path) -> None:
    """Draw both curves with our crossing and the paper's.

    Args:
        raw: Complete raw data.
        path: The PNG to write.
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
