"""`torch-thor figures`: the list of figures, and the command that measures and draws them."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table
from torch.distributed import is_torchelastic_launched

from torch_thor.bench.figures.batch_sizes import BATCH_SIZES
from torch_thor.bench.figures.bert import BERT
from torch_thor.bench.figures.curves import CURVES
from torch_thor.bench.figures.figure import WHICH_RUNS, Figure, Options
from torch_thor.bench.figures.fisher_norm import FISHER_NORM
from torch_thor.bench.figures.raw import RawData, RawFile, differences, plain, read
from torch_thor.bench.figures.split_dim import SPLIT_DIM
from torch_thor.bench.machine import describe_device
from torch_thor.bench.runner import complete_here, missing
from torch_thor.bench.stores import key_of, write_whole
from torch_thor.files import check_place, writing
from torch_thor.training import device_of
from torch_thor.training.errors import UserError, require
from torch_thor.training.keys import nearest
from torch_thor.training.printing import printer

FIGURES: dict[str, Figure] = {
    "curves": CURVES,
    "fisher-norm": FISHER_NORM,
    "split-dim": SPLIT_DIM,
    "batch-sizes": BATCH_SIZES,
    "bert": BERT,
}
ALL = "all"
ANOTHER = "choose another folder with --out"


@dataclass(frozen=True)
class FigureJob:
    """One run of a figure, as a job.

    Args:
        figure: The name of the figure.
        settings: The settings of the figure.
        which: The values that identify the run.
        console: The console that shows progress.
    """

    figure: str
    settings: Mapping[str, Any]
    which: Mapping[str, Any]
    console: Console

    @property
    def key(self) -> str:
        """The name of the run."""
        return key_of(self.which)

    def run(self) -> dict[str, Any]:
        """Measure the run."""
        return {"job": self.which, **plain(FIGURES[self.figure].measure(self.settings, self.which, self.console))}


def figure_table() -> Table:
    """List the figures."""
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
    """Measure the runs of a figure that are missing, and draw it."""
    names = list(FIGURES) if name == ALL else [name]
    known = [*FIGURES, ALL]
    require(name in known, f"there is no figure {name}{nearest(name, known)}: the figures are {', '.join(known)}")
    require(not is_torchelastic_launched(), "figures are measured by one process: leave out torchrun")
    require(not (redraw and overwrite), "--redraw and --overwrite exclude each other: choose one")
    for option in options.given():
        word = f"--{option.replace('_', '-')}"
        require(not redraw, f"--redraw draws what was measured: leave out {word}")
        takers = [key for key, figure in FIGURES.items() if option in figure.takes]
        require(not set(takers).isdisjoint(names), f"{word} means nothing to {name}: it is for {', '.join(takers)}")
    check_place(out)
    paths = {each: out / f"{each}.json" for each in names}

    def find(each: str) -> RawData:
        path = paths[each]
        return _stored(each, path) if redraw else _opened(each, path, options, device, overwrite=overwrite)

    for each in names:  # all are checked first, because measuring a figure may take hours
        find(each)
    with writing(out, ANOTHER):
        out.mkdir(parents=True, exist_ok=True)
    for each in names:
        with _locked(out, each):
            raw = find(each)  # another process may have continued it
            _complete(raw, paths[each], console)
            _show(raw, paths[each], console)


def _show(raw: RawData, path: Path, console: Console) -> None:
    figure = FIGURES[raw.figure]
    raw = raw.only(figure.jobs(raw.settings))  # the file may hold runs of more seeds
    text = figure.table(raw)
    write_whole(path.with_suffix(".md"), text + "\n", ANOTHER)
    with writing(path.with_suffix(".png"), ANOTHER):
        figure.draw(raw, path.with_suffix(".png"))
    for line in text.splitlines():
        printer(console)(line)
    printer(console)(f"Raw data, picture and table are {path.with_suffix('')}.json, .png and .md")


def _jobs(raw: RawData, console: Console | None = None) -> list[FigureJob]:
    """List the runs that the settings require."""
    shown = console or Console(quiet=True)
    return [FigureJob(raw.figure, raw.settings, job, shown) for job in FIGURES[raw.figure].jobs(raw.settings)]


def _stored(name: str, path: Path) -> RawData:
    """Read the raw data that --redraw draws."""
    raw = read(path, name)
    if raw is None:
        raise UserError(f"{path} is not there, so there is nothing to draw again: leave out --redraw to measure")
    lacking = len(missing(_jobs(raw), RawFile(raw, path)))
    require(
        not lacking,
        f"{path} lacks {lacking} of {len(raw.runs) + lacking} runs: to go on leave out --redraw, and give the options "
        "that it was begun with",
    )
    return raw


def _opened(name: str, path: Path, options: Options, device: str, *, overwrite: bool) -> RawData:
    """Return the raw data to continue: existing ones that were measured with the same settings, or new ones."""
    figure = FIGURES[name]
    settings = plain(
        figure.settings(Options(**{key: getattr(options, key) for key in figure.takes}), str(device_of(device)))
    )
    with _threads_of(settings):
        raw = RawData(name, settings, plain(describe_device(settings["device"])))
    there = None if overwrite else read(path, name)
    if there is None:
        return raw
    changed = differences(*({k: v for k, v in own.settings.items() if k not in WHICH_RUNS} for own in (there, raw)))
    require(
        not changed,
        f"{path} was measured with other settings ({changed}): measure anew with --overwrite, draw what is there with "
        "--redraw, or choose another folder with --out",
    )
    elsewhere = differences(there.machine, raw.machine)
    require(
        not elsewhere or not missing(_jobs(there), RawFile(there, path)),
        f"{path} was begun on another machine or with other versions ({elsewhere}): measure anew with --overwrite, or "
        "choose another folder with --out",
    )
    there.settings = settings  # runs of other seeds stay in the file
    return there


def _complete(raw: RawData, path: Path, console: Console) -> None:
    """Measure the missing runs one after the other, and write each to the disk before the next one starts."""
    say = printer(console)
    with _threads_of(raw.settings):
        if not complete_here(_jobs(raw, console), RawFile(raw, path), say=lambda line: say(f"{raw.figure}: {line}")):
            raw.write(path)  # the settings may list other seeds than before
            say(f"{path} holds all runs: drawn again, nothing measured")


@contextmanager
def _threads_of(settings: Mapping[str, Any]) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(settings.get("recipe", {}).get("threads") or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _locked(out: Path, name: str) -> Iterator[None]:
    """Let no other process measure the figure; the file of the lock names this one."""
    path = out / f".{name}.lock"
    with writing(path, ANOTHER):
        try:
            lock = FileLock(path, blocking=False).acquire()
        except Timeout as error:  # a subclass of OSError
            owner = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
            raise UserError(f"figure {name} in {out} is in use by {owner}: wait for it, or {ANOTHER}") from error
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    with lock:
        yield
