"""The report of `torch-thor split-dim`: its tables, its figure, and a file with all measured values."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torch_thor import __version__
from torch_thor.split.choice import SplitChoice, choose_split_dim
from torch_thor.training.config.run_config import check_seed
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.errors import UserError, first_line, require
from torch_thor.training.output_files import check_place, write_whole, writing
from torch_thor.training.printing import cell, printer, visible
from torch_thor.training.reports.pictures import save_picture
from torch_thor.training.reports.split_subject import load_subject, sample_images

FIGURE_FILE, NUMBERS_FILE = "split_dim.png", "split_dim.json"


def report_split_dim(
    word: str,
    out: Path,
    console: Console,
    *,
    device: str,
    batch: int,
    pixels: int,
    data: Path | None,
    seed: int,
    overwrite: bool,
) -> SplitChoice:
    """Choose the split dimension of a model, and print and write the report.

    Args:
        word: The model: a torchvision or timm name, or `FILE.py:FUNCTION`.
        out: The folder of the results.
        console: Where the tables are printed.
        device: The device to measure on: `auto` or the name of a device.
        batch: Number of sample images.
        pixels: Height and width of the sample images.
        data: A folder of images; `None` uses the two photographs that scikit-learn contains.
        seed: Seed of the weights and the crops.
        overwrite: Whether to replace existing results.

    Returns:
        The choice.

    Raises:
        UserError: If the model cannot be built or run, or the results would overwrite others.
    """
    files = [out / FIGURE_FILE, out / NUMBERS_FILE]
    there = [file for file in files if file.exists()]
    require(not there or overwrite, f"{there and there[0]} exists already: give another --out, or --overwrite")
    check_place(out)
    choice, numbers = measure_split_dim(word, console, device=device, batch=batch, pixels=pixels, data=data, seed=seed)
    say = printer(console)
    for table in (loss_table(choice), choice_table(choice)):
        console.print(table)
    say(verdict(choice))
    remedy = "choose another folder with --out"  # the results have been printed already
    with writing(out, remedy):
        out.mkdir(parents=True, exist_ok=True)
    write_whole(files[1], json.dumps(numbers, indent=1) + "\n", remedy)
    with writing(files[0], remedy):
        draw_choice(choice, word, files[0])
    say(f"Figure and numbers are in {out}")
    return choice


def measure_split_dim(
    word: str, console: Console, *, device: str, batch: int, pixels: int, data: Path | None, seed: int
) -> tuple[SplitChoice, dict[str, Any]]:
    """Choose the split dimension of a model.

    Args:
        word: The model: a torchvision or timm name, or `FILE.py:FUNCTION`.
        console: Where a line about the measurement is printed.
        device: The device to measure on: `auto` or the name of a device.
        batch: Number of sample images.
        pixels: Height and width of the sample images.
        data: A folder of images; `None` uses the two photographs that scikit-learn contains.
        seed: Seed of the weights and the crops.

    Returns:
        The choice, and all measured values and settings as JSON values.

    Raises:
        UserError: If the model cannot be built or run.
    """
    require(batch >= 1, f"--batch {batch}: give 1 or more")
    require(pixels >= 1, f"--pixels {pixels}: give 1 or more")
    check_seed("--seed ", seed)
    where = resolve_device(device)
    subject = load_subject(word, seed)
    sample, source = subject.sample_batch, f"the batch that {word} returned"
    if sample is None:
        sample, source = sample_images(batch, pixels, data, seed)
    printer(console)(f"{word} on {where}; sample: {source}. Inverting large blocks takes long ...")
    try:
        choice = choose_split_dim(subject.model, sample, where, loss_fn=subject.loss_fn)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{word} could not be measured: {first_line(error)} (try other --pixels or --batch, or give a "
            "FILE.py:FUNCTION that returns (model, sample_batch, loss_fn))"
        ) from error
    numbers = {
        "model": word,
        "sample": source,
        "batch": None if subject.sample_batch is not None else batch,
        "pixels": None if subject.sample_batch is not None else pixels,
        "seed": seed,
        "torch": torch.__version__,
        "torch_thor": __version__,
        **choice.as_dict(),
    }
    return choice, numbers


def verdict(choice: SplitChoice) -> str:
    """Describe the choice and its reason.

    Args:
        choice: The choice.

    Returns:
        A sentence.
    """
    if choice.crossing is None:
        return f"The curves do not cross, because even unsplit factors are cheap: split_dim={choice.split_dim}"
    return f"The curves cross at {choice.crossing:.0f}: split_dim={choice.split_dim}"


def choice_table(choice: SplitChoice) -> Table:
    """Make a table of both curves.

    Args:
        choice: The choice.

    Returns:
        A table with a row per candidate.
    """
    table = Table(title=f"Split dimension on {choice.device}", title_justify="left")
    for heading in ("block size s", "factors that lose < 1 %", "p_1 / p_s", "p_s: all inverses once", ""):
        table.add_column(heading, justify="right")
    for size, kept, speed, seconds in zip(
        choice.candidates, choice.information, choice.performance, choice.seconds, strict=True
    ):
        mark = "<- chosen" if size == choice.split_dim else ""
        table.add_row(str(size), f"{kept:.1%}", f"{speed:.3f}", f"{1000 * seconds:.1f} ms", mark)
    return table


def loss_table(choice: SplitChoice) -> Table:
    """Make a table of the loss of spectral norm of each layer at the chosen split.

    Args:
        choice: The choice.

    Returns:
        A table with a row per layer.
    """
    table = Table("layer", title=f"Loss of spectral norm at split_dim={choice.split_dim}", title_justify="left")
    table.add_column("A", justify="right")
    table.add_column("G", justify="right")
    index = choice.candidates.index(choice.split_dim)
    for name, factors in choice.losses.items():
        table.add_row(cell(name), *(f"{factors[key][index]:.1%}" if key in factors else "uncut" for key in "AG"))
    return table


def draw_choice(
    choice: SplitChoice, title: str, path: Path, elsewhere: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Draw the curves of performance and information, and mark where they cross.

    Args:
        choice: The choice.
        title: The name of the model, for the title.
        path: The file to write; its suffix determines the format.
        elsewhere: Crossings from other sources, by their labels.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot, which may open windows

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(choice.candidates, choice.performance, marker="o", label="performance: $p_1 / p_s$")
    axes.plot(
        choice.candidates, choice.information, marker="s", label="information: factors that lose < 1 % of their norm"
    )
    if choice.crossing is not None:
        label = f"crossing at {choice.crossing:.0f}: split_dim={choice.split_dim}"
        axes.axvline(choice.crossing, color="grey", linestyle="--", label=label)
    for label, crossing in elsewhere.items():
        axes.axvline(crossing, color="#d55e00", linestyle=":", label=label)
    axes.set_xscale("log", base=2)
    following = (*choice.candidates[1:], math.inf)
    names = [
        "" if after < 1.3 * size else str(size) for size, after in zip(choice.candidates, following, strict=True)
    ]  # labels such as 4096 and 4608 would overlap
    axes.set_xticks(choice.candidates, names)
    axes.minorticks_off()
    title = visible(title).replace("$", r"\$")  # matplotlib would read $ as the beginning of a formula
    axes.set(xlabel="block size s", title=f"{title}, {choice.device}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center")
    save_picture(figure, path)
