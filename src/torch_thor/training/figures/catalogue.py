"""`torch-thor figures`: which figures there are, and when one is measured, gone on with, drawn again or refused."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from torch_thor.training.errors import UserError, require
from torch_thor.training.figures.batch_sizes import BATCH_SIZES
from torch_thor.training.figures.curves import CURVES
from torch_thor.training.figures.figure import Figure, Options, device_of
from torch_thor.training.figures.fisher_norm import FISHER_NORM
from torch_thor.training.figures.measuring import describe, threads
from torch_thor.training.figures.raw import RawData, differences, plain, read, write_whole
from torch_thor.training.figures.split_dim import SPLIT_DIM
from torch_thor.training.library_models import nearest

FIGURES: dict[str, Figure] = {
    "curves": CURVES,
    "fisher-norm": FISHER_NORM,
    "split-dim": SPLIT_DIM,
    "batch-sizes": BATCH_SIZES,
}
ALL = "all"


def figure_table() -> Table:
    """The figures there are.

    Returns:
        A table for a Rich console.
    """
    table = Table("figure", "shows", "options")
    for name, figure in FIGURES.items():
        table.add_row(name, figure.about, " ".join(f"--{option.replace('_', '-')}" for option in figure.takes))
    table.add_row(ALL, "each of these, one after the other", "those of each")
    return table


def make_figures(
    name: str,
    out: Path,
    console: Console,
    options: Options,
    *,
    device: str = "auto",
    overwrite: bool = False,
    redraw: bool = False,
) -> None:
    """Measure what is not there yet, and draw.

    Args:
        name: A key of `FIGURES`, or `all`.
        out: Where raw data, picture and table go: NAME.json, NAME.png, NAME.md.
        console: Where to print.
        options: What the user said of the figures.
        device: To measure on, as a recipe has it.
        overwrite: Throw away raw data that is there.
        redraw: Draw from raw data that is there, whatever its settings; measure nothing.
    """
    names = list(FIGURES) if name == ALL else [name]
    known = [*FIGURES, ALL]
    require(name in known, f"there is no figure {name}{nearest(name, known)}: the figures are {', '.join(known)}")
    require(not (redraw and overwrite), "--redraw and --overwrite exclude each other: choose one")
    for option in options.given():
        word = f"--{option.replace('_', '-')}"
        require(not redraw, f"--redraw draws what was measured: leave out {word}")
        takers = [key for key, figure in FIGURES.items() if option in figure.takes]
        require(not set(takers).isdisjoint(names), f"{word} means nothing to {name}: it is for {', '.join(takers)}")
    _claim(out)
    for each in names:
        path = out / f"{each}.json"
        raw = _redrawn(each, path) if redraw else _measured(each, path, console, options, device, overwrite=overwrite)
        figure = FIGURES[each]
        text = figure.table(raw)
        write_whole(path.with_suffix(".md"), text + "\n")
        figure.draw(raw, path.with_suffix(".png"))
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"Raw data, picture and table are {path.with_suffix('')}.json, .png and .md", soft_wrap=True)


def _claim(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be a folder ({error.strerror}): choose another") from error


def _redrawn(name: str, path: Path) -> RawData:
    raw = read(path, name)
    if raw is None:
        raise UserError(f"{path} is not there, so there is nothing to draw again: leave out --redraw to measure")
    jobs = FIGURES[name].jobs(raw.settings)
    done = sum(raw.run(**job) is not None for job in jobs)
    require(
        done == len(jobs),
        f"{path} holds {done} of {len(jobs)} runs: to go on leave out --redraw, and give the options it was begun with",
    )
    return raw


def _measured(name: str, path: Path, console: Console, options: Options, device: str, *, overwrite: bool) -> RawData:
    figure = FIGURES[name]
    taken = Options(**{option: getattr(options, option) for option in figure.takes})
    settings = plain(figure.settings(taken, device_of(device)))
    with threads(settings.get("recipe", {}).get("threads")):
        raw = RawData(name, settings, plain(describe(settings["device"])))
        there = None if overwrite else read(path, name)
        if there is not None:
            changed = differences(there.settings, raw.settings)
            require(
                not changed,
                f"{path} was measured with other settings ({changed}): measure anew with --overwrite, draw what is "
                "there with --redraw, or choose another folder with --out",
            )
            if all(there.run(**job) is not None for job in figure.jobs(settings)):
                console.print(
                    f"{path} holds all runs with these settings: drawn again, nothing measured", soft_wrap=True
                )
                return there
            elsewhere = differences(there.machine, raw.machine)
            require(
                not elsewhere,
                f"{path} was begun on another machine or other versions ({elsewhere}): measure anew with --overwrite, "
                "or choose another folder with --out",
            )
            raw = there
        jobs = figure.jobs(settings)
        for number, job in enumerate(jobs, start=1):
            if raw.run(**job) is None:
                raw.runs.append({"job": job, **plain(figure.measure(settings, job, console))})
                raw.write(path)
                console.print(f"{name}: {number} of {len(jobs)} runs done", soft_wrap=True)
    return raw
