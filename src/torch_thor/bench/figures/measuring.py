"""Trains one run of a figure from the settings in the raw data, and converts its measurements into JSON values."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import yaml
from rich.console import Console

from torch_thor.bench.recipes import trained
from torch_thor.training import (
    DivergedError,
    Observer,
    Point,
    Ranks,
    Recipe,
    Record,
    Run,
    build,
    device_of,
    open_task,
    primary,
)
from torch_thor.training.optimizers import settings_of
from torch_thor.training.printing import printer
from torch_thor.training.progress import Bar, Lines
from torch_thor.training.recipes import parse

UNUSED = {  # keys of a recipe that are set for each run, or do not affect results
    "name", "about", "reaches", "optimizer", "seed", "device", "checkpoint_interval", "keep_checkpoints", "keep_best",
    "log_interval",
}  # fmt: skip


class ProcessorClock(Observer):
    """Measures the processor time of the training steps alone, which other processes on the machine hardly affect."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = time.process_time()

    def step(self, run: Run, point: Point) -> None:
        """Record the time at the end of a step."""
        self.seconds.append(time.process_time() - self._begun)

    def end_of_step(self, run: Run) -> None:
        """Exclude the time since the step, which observers and evaluations have taken."""
        self._begun = time.process_time() - self.seconds[-1]


@dataclass
class Trained:
    """A completed training, with the message of the error if it has diverged, and the processor time of its steps."""

    run: Run
    record: Record
    failure: str | None
    clock: ProcessorClock

    def plain(self) -> dict[str, Any]:
        """Return every point of the run as JSON values: columns, which take a fraction of the size of mappings."""
        return {
            "steps_per_epoch": self.run.task.steps_per_epoch,
            "failure": self.failure,
            **to_columns(self.run, self.record),
            "processor_seconds": self.clock.seconds,
        }


def recipe_settings(recipe: Recipe, optimizers: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a recipe that affect the results of a figure, with all settings of these optimizers alone."""
    keys = recipe.model_dump(mode="json", exclude=UNUSED)
    own = {name: {**settings_of(name), **recipe.optimizers.get(name, {})} for name in optimizers}
    return {**keys, "optimizers": own}


def train_run(
    settings: Mapping[str, Any],
    optimizer: str,
    words: Sequence[str],
    console: Console,
    *,
    label: str,
    observers: Sequence[Observer] = (),
    prepare: Callable[[Run], None] = lambda _: None,
    may_diverge: bool = False,
) -> Trained:
    """Train one run.

    Args:
        settings: Settings with the keys `recipe` (a result of `recipe_settings`) and `device`.
        optimizer: The name of one of the recipe's optimizers.
        words: `key=value`, as for `torch-thor train`.
        console: The console that shows progress.
        label: The name of the run in the progress display.
        observers: Further observers of the training.
        prepare: Called with the run before the first step.
        may_diverge: Whether a training that diverges counts as a result and not as an error.

    Returns:
        The completed training.

    Raises:
        DivergedError: The training has diverged, and `may_diverge` is False.
    """
    own = [f"optimizer={optimizer}", f"device={settings['device']}", "log_interval=null", *words]
    recipe = parse(yaml.safe_dump(settings["recipe"]), "figures", own)
    device = device_of(recipe.device)
    run = build(recipe, optimizer, open_task(recipe, device, printer(console)), Ranks(device=device))
    run.name = label
    prepare(run)
    clock = ProcessorClock()
    shown = Bar(run, console) if console.is_interactive else Lines(run, console)
    record, failure = trained(run, [clock, *observers, shown])
    if failure is not None and not may_diverge:
        raise DivergedError(failure)
    return Trained(run, record, failure, clock)


def to_columns(run: Run, record: Record) -> dict[str, dict[str, list[Any]]]:
    """Return a list of values for each entry of steps, evaluations and refreshes, with the names of `metrics.jsonl`."""
    metric = primary(run.task.metrics)
    names, scores = [one.name for one in run.task.metrics], record.scores
    steps = {one.name: [getattr(point, one.name) for point in record.points] for one in fields(Point)}
    del steps["events"]
    evaluations: dict[str, list[Any]] = {
        "step": [score.step for score in scores],
        "seconds": [score.seconds for score in scores],
        **{name: [score.metrics[name] for score in scores] for name in names},
        **{f"averaged_{name}": [(score.averaged or {}).get(name) for score in scores] for name in names},
        "primary": [metric.name for _ in scores],
        "higher_is_better": [metric.higher_is_better for _ in scores],
    }
    events = [(point.step, event) for point in record.points for event in point.events]
    refreshes: dict[str, list[Any]] = {
        "step": [step for step, _ in events],
        "layer": [event.layer for _, event in events],
        "decision": [event.decision.value for _, event in events],
        "trace_change": [_finite(event.trace_change) for _, event in events],
        "trace": [_finite(event.trace) for _, event in events],
    }
    return {"steps": steps, "evaluations": evaluations, "refreshes": refreshes}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
