"""One training for a figure: from the settings in the raw data to a run, and its history as plain values."""

import itertools
import statistics
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
from torch_thor.training.engine import history
from torch_thor.training.engine.history import History as Record
from torch_thor.training.engine.history import StepPoint
from torch_thor.training.engine.loop import Callback, Run, train
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.errors import DivergedError
from torch_thor.training.experiment import new_run
from torch_thor.training.printing import printer
from torch_thor.training.tasks.registry import TASKS

UNUSED = (  # keys of a recipe that each run sets, or that change no number
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
COLUMNS = {"steps": "step", "evaluations": "eval", "refreshes": "refresh"}  # lists of a record -> kinds of point


class ProcessorClock(Callback):
    """Processor time of the training steps alone: what others run on the machine is not in it."""

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
        """Note the time up to here.

        Args:
            run: The training.
            point: What the step measured.
        """
        self.seconds.append(time.process_time() - self._begun)

    def at_boundary(self, run: Run) -> None:
        """Leave out what came after the step: callbacks and evaluations.

        Args:
            run: The training.
        """
        self._begun = time.process_time() - self.seconds[-1]


@dataclass
class Trained:
    """A training that is over.

    Args:
        run: The run.
        failure: Why it ended early; `None` if it did not.
        clock: Its processor time.
    """

    run: Run
    failure: str | None = None
    clock: ProcessorClock = field(default_factory=ProcessorClock)

    def plain(self) -> dict[str, Any]:
        """Every point of the run, in plain values.

        Returns:
            Steps in an epoch, the columns of the record, and processor seconds at each step.
        """
        columns = to_columns(self.run.record, [metric.name for metric in self.run.task.metrics()])
        return {
            "steps_per_epoch": self.run.steps_per_epoch,
            "failure": self.failure,
            **columns,
            "processor_seconds": self.clock.seconds,
        }


def recipe_settings(recipe: Recipe, optimizers: Sequence[str]) -> dict[str, Any]:
    """Select the keys of a recipe that decide the runs of a figure.

    Args:
        recipe: The recipe.
        optimizers: Those that are trained with.

    Returns:
        Its keys without those that each run sets or that change no number; settings of the optimizers named alone.
    """
    # environment variables are resolved now; the folder of the data may be a secret, and changes nothing
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
        The run, done.

    Raises:
        DivergedError: If the training diverged, and may not.
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


def processor_time_counts(settings: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Tell whether a figure shows processor time: on one thread of a CPU it is what a quiet machine takes.

    Args:
        settings: With `device`.
        machine: What `describe` gave.

    Returns:
        True for one thread of a CPU; elsewhere figures show the time on the wall.
    """
    return bool(settings["device"] == "cpu" and machine["threads"] == 1)


def seconds_of(run: Mapping[str, Any], *, processor: bool) -> list[float]:
    """When each step was done.

    Args:
        run: Of the raw data.
        processor: Whether in processor time, or in time on the wall; of training steps alone both.

    Returns:
        Seconds, one number per step.
    """
    return list(run["processor_seconds"] if processor else run["steps"]["seconds"])


def median_step(run: Mapping[str, Any], *, refresh: bool, processor: bool) -> float | None:
    """Return the median time of a step.

    Args:
        run: Of the raw data.
        refresh: Whether to look at the steps that refreshed curvature, or at the others.
        processor: As for `seconds_of`.

    Returns:
        The median in seconds, or `None` if there were no such steps.
    """
    took = [after - before for before, after in itertools.pairwise([0.0, *seconds_of(run, processor=processor)])]
    chosen = [time for time, was in zip(took, run["steps"]["refresh"], strict=True) if was == refresh]
    return statistics.median(chosen) if chosen else None


def to_columns(record: Record, metrics: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """Every point of a run, a list for each of its fields: a fraction of what a mapping for each point takes.

    Args:
        record: The run's.
        metrics: Names of the metrics of its evaluations.

    Returns:
        `steps`, `evaluations` and `refreshes`, each field name -> values in order.
    """
    return {name: history.to_columns(kind, getattr(record, name), metrics) for name, kind in COLUMNS.items()}


def from_columns(columns: Mapping[str, Mapping[str, list[Any]]]) -> Record:
    """Rebuild a record.

    Args:
        columns: What `to_columns` made.

    Returns:
        The record.
    """
    return Record(**{name: history.from_columns(kind, columns[name]) for name, kind in COLUMNS.items()})
