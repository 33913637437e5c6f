"""One training for a figure: from the settings in the raw data to a run, from its record to plain values and back."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from torch_thor import __version__
from torch_thor.split.machine import device_name
from torch_thor.training.callbacks import Bar
from torch_thor.training.data import load_data
from torch_thor.training.errors import UserError
from torch_thor.training.experiment import new_run
from torch_thor.training.loop import Callback, Run, resolve_device, train
from torch_thor.training.recipe import Recipe, parse_recipe, recipe_yaml
from torch_thor.training.record import KINDS, Record

UNUSED = ("name", "about", "optimizer", "seed", "checkpoint_interval", "keep_checkpoints", "device")
COLUMNS = {"steps": "step", "evaluations": "eval", "refreshes": "refresh"}  # lists of a record -> kinds of point


def recipe_settings(recipe: Recipe, optimizers: Sequence[str]) -> dict[str, Any]:
    """What of a recipe decides the runs of a figure.

    Args:
        recipe: The recipe.
        optimizers: Those that are trained with.

    Returns:
        Its keys without those that each run sets or that change no number; settings of the optimizers named alone.
    """
    keys = {key: value for key, value in yaml.safe_load(recipe_yaml(recipe)).items() if key not in UNUSED}
    return {**keys, "optimizers": {name: keys["optimizers"][name] for name in optimizers}}


def train_run(
    settings: Mapping[str, Any],
    optimizer: str,
    overrides: Sequence[str],
    console: Console,
    *,
    label: str,
    callbacks: Sequence[Callback] = (),
    prepare: Callable[[Run], None] | None = None,
    may_diverge: bool = False,
) -> tuple[Run, str | None]:
    """Train once.

    Args:
        settings: With `recipe` (as `recipe_settings` gives it) and `device`.
        optimizer: Which of its optimizers.
        overrides: `key=value` words, as `torch-thor train` takes them.
        console: Where progress is shown.
        label: What to call the run there.
        callbacks: Told what happens.
        prepare: Called before the first step.
        may_diverge: Whether a loss that is no longer finite is a result, and not an error.

    Returns:
        The run, and why it ended early; `None` if it did not.

    Raises:
        UserError: If the recipe cannot be trained, or the training diverged and may not.
    """
    words = [f"optimizer={optimizer}", f"device={settings['device']}", *overrides]
    recipe = parse_recipe(yaml.safe_dump(settings["recipe"]), "figures", words)
    run = new_run(recipe, optimizer, load_data(recipe.data).to(resolve_device(recipe.device)))
    if prepare is not None:
        prepare(run)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]} {task.fields[accuracy]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None, loss="", accuracy="")
        try:
            train(run, [*callbacks, Bar(progress, task)])
        except UserError as error:  # data in memory cannot fail in training: the loss or a gradient was not finite
            if not may_diverge:
                raise
            return run, str(error)
    return run, None


def to_columns(record: Record) -> dict[str, dict[str, list[Any]]]:
    """Every point of a run, a list for each of its fields: a fraction of what a mapping for each point takes.

    Args:
        record: The run's.

    Returns:
        `steps`, `evaluations` and `refreshes`, each field name -> values in order.
    """
    return {
        name: {
            item.name: [getattr(point, item.name) for point in getattr(record, name)] for item in fields(KINDS[kind])
        }
        for name, kind in COLUMNS.items()
    }


def from_columns(columns: Mapping[str, Mapping[str, list[Any]]]) -> Record:
    """Rebuild a record.

    Args:
        columns: What `to_columns` made.

    Returns:
        The record.
    """
    return Record(
        **{
            name: [
                KINDS[kind](**dict(zip(columns[name], values, strict=True)))
                for values in zip(*columns[name].values(), strict=True)
            ]
            for name, kind in COLUMNS.items()
        }  # type: ignore[arg-type]
    )


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Use so many threads of the CPU while the block runs.

    Args:
        count: How many; `None` leaves torch's choice.

    Yields:
        Nothing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe(device: str) -> dict[str, Any]:
    """What a measurement is made on.

    Args:
        device: Its device.

    Returns:
        Plain values: the device (with the CPU's threads), and the versions.
    """
    import torchvision

    return {
        "device": device_name(torch.device(device)),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "torch_thor": __version__,
    }
