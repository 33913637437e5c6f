"""Trains one run of a figure from the settings in the raw data, and converts its history into JSON values."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from rich.console import Console

from torch_thor.training.callbacks.progress import Bar, Display, Lines
from torch_thor.training.config.recipe import FREE_ON_RESUME, Recipe
from torch_thor.training.config.recipe_text import parse_recipe, recipe_yaml
from torch_thor.training.config.recipe_values import covers
from torch_thor.training.engine import history_format
from torch_thor.training.engine.history import History as Record
from torch_thor.training.engine.history import StepPoint
from torch_thor.training.engine.loop import Callback, Run, train
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.errors import DivergedError
from torch_thor.training.experiment import new_run
from torch_thor.training.printing import printer
from torch_thor.training.tasks.registry import TASKS

UNUSED = (  # keys of a recipe that are set for each run, or do not affect results
    "name",
    "about",
    "reaches",
    "optimizer",
    "seed",
    "device",
    "checkpoint_interval",
    "keep_checkpoints",
    "keep_best",
    "log_interval",
)
COLUMNS = {"steps": "step", "evaluations": "eval", "refreshes": "refresh"}  # the lists of a record: the kind of point


class ProcessorClock(Callback):
    """Measures the processor time of the training steps alone, which other processes on the machine hardly affect."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def before_training(self, run: Run) -> None:
        """Start the clock.

        Args:
            run: The training.
        """
        self._begun = time.process_time()

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Record the time at the end of a step.

        Args:
            run: The training.
            point: The measurements of the step.
        """
        self.seconds.append(time.process_time() - self._begun)

    def at_boundary(self, run: Run) -> None:
        """Exclude the time since the step, which callbacks and evaluations have taken.

        Args:
            run: The training.
        """
        self._begun = time.process_time() - self.seconds[-1]


@dataclass
class Trained:
    """A completed training.

    Args:
        run: The run.
        failure: The message of the error if the training has diverged; otherwise `None`.
        clock: The processor time of its steps.
    """

    run: Run
    failure: str | None = None
    clock: ProcessorClock = field(default_factory=ProcessorClock)

    def plain(self) -> dict[str, Any]:
        """Return every point of the run as JSON values.

        Returns:
            The number of steps per epoch, the failure, the columns of the record, and processor seconds at each step.
        """
        columns = to_columns(self.run.record, [metric.name for metric in self.run.task.metrics()])
        return {
            "steps_per_epoch": self.run.steps_per_epoch,
            "failure": self.failure,
            **columns,
            "processor_seconds": self.clock.seconds,
        }


def recipe_settings(recipe: Recipe, optimizers: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a recipe that affect the results of a figure.

    Args:
        recipe: The recipe.
        optimizers: The names of the optimizers that the figure uses.

    Returns:
        The keys of the recipe, without those that are set for each run or do not affect results, and with the settings
        of these optimizers alone.
    """
    # Environment variables are resolved here, except in the folder of the data, which may be private.
    written = {key: text for key, text in recipe.written.items() if covers(FREE_ON_RESUME, key) and key != "epochs"}
    text = recipe_yaml(replace(recipe, written=written))
    keys = {key: value for key, value in yaml.safe_load(text).items() if key not in UNUSED}
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
) -> Trained:
    """Train one run.

    Args:
        settings: Settings with the keys `recipe` (a result of `recipe_settings`) and `device`.
        optimizer: The name of one of the recipe's optimizers.
        overrides: Overrides `key=value`, as for `torch-thor train`.
        console: The console that shows progress.
        label: The name of the run in the progress display.
        callbacks: Further callbacks of the training.
        prepare: Called with the run before the first step.
        may_diverge: Whether a training that diverges counts as a result and not as an error.

    Returns:
        The completed training.

    Raises:
        DivergedError: The training has diverged, and `may_diverge` is False.
    """
    words = [f"optimizer={optimizer}", f"device={settings['device']}", *overrides]
    recipe = parse_recipe(yaml.safe_dump(settings["recipe"]), "figures", words)
    say = printer(console)
    run = new_run(recipe, optimizer, TASKS[recipe.task].open(recipe, resolve_device(recipe.device), say, say))
    if prepare is not None:
        prepare(run)
    trained = Trained(run)
    hidden = not console.is_interactive
    with Display(console=console, transient=True, disable=hidden) as display:
        shown = Lines(display, label, None) if hidden else Bar(display, display.add_run(label))
        try:
            train(run, [trained.clock, *callbacks, shown])
        except DivergedError as error:
            if not may_diverge:
                raise
            trained.failure = str(error)
    return trained


def to_columns(record: Record, metrics: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """Return every point of a record in columns, which take a fraction of the size of a mapping for each point.

    Args:
        record: The record of a run.
        metrics: The names of the metrics of its evaluations.

    Returns:
        For each of `steps`, `evaluations` and `refreshes`, a mapping from the names of fields to lists of values.
    """
    return {name: history_format.to_columns(kind, getattr(record, name), metrics) for name, kind in COLUMNS.items()}


def from_columns(columns: Mapping[str, Any]) -> Record:
    """Return the record for columns.

    Args:
        columns: A result of `to_columns`, or a run of the raw data, which contains one.

    Returns:
        The record.
    """
    return Record(**{name: history_format.from_columns(kind, columns[name]) for name, kind in COLUMNS.items()})
