"""Trains for comparisons, in this process and without writing files."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torch_thor.bench.machine import describe
from torch_thor.training import (
    DivergedError,
    Observer,
    Point,
    Ranks,
    Recipe,
    Record,
    Run,
    Task,
    build,
    device_of,
    load_recipe,
    loop,
    open_task,
    primary,
    to_yaml,
    train,
)
from torch_thor.training.parallel import RankWeight
from torch_thor.training.precision import Precision


def train_recipe(name: str, optimizer: str, words: Sequence[str]) -> tuple[Run, Record, dict[str, Any]]:
    """Train a recipe once.

    Args:
        name: The name of the recipe.
        optimizer: The name of one of its optimizers.
        words: `key=value`, as for `torch-thor train`.

    Returns:
        The run, its measurements, and these as JSON values. `failure` is the message of the error if the training has
        diverged, which counts as a result; each of the `evaluations` is (step, primary metric, seconds).
    """
    recipe = load_recipe(name, [f"optimizer={optimizer}", *words])
    device = device_of(recipe.device)
    run = build(recipe, optimizer, open_task(recipe, device, print), Ranks(device=device))
    record, failure = trained(run)
    metric = primary(run.task.metrics).name
    return run, record, {
        "steps": run.total_steps,
        "failure": failure,
        "evaluations": [[score.step, score.value(metric), round(score.seconds, 2)] for score in record.scores],
        "loss": [round(point.loss, 5) for point in record.points],
        "seconds_ordinary_step": _median(record, refresh=False),
        "seconds_refresh_step": _median(record, refresh=True),
        "machine": describe(),
        "recipe": to_yaml(recipe),
    }  # fmt: skip


def trained(run: Run, observers: Sequence[Observer] = ()) -> tuple[Record, str | None]:
    """Train; return what was measured, and the message of the error if the training has diverged."""
    record = Record()
    try:
        train(run, [record, *observers])
    except DivergedError as error:
        return record, str(error)
    return record, None


def run_of(recipe: Recipe, task: Task, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Run:
    """Build a run on the CPU whose optimizer is made by a function, for optimizers that a recipe cannot name."""
    torch.manual_seed(recipe.seed)
    model, ranks = task.model(), Ranks()
    precision = Precision(recipe.precision, recipe.loss_scale, ranks.device)
    return Run(recipe, "own", task, model, model, make(model), precision, ranks, RankWeight())


def step_of(run: Run) -> Callable[[], Point]:
    """Return a function that takes a step as the training loop does, which also reads the batch of the next one."""
    feed = loop.Feed(run, ())
    return lambda: loop.take_step(run, feed)


def evaluations_of(run: Run, record: Record) -> list[tuple[int, float]]:
    """Return step and primary metric of each evaluation, rounded as in raw data."""
    metric = primary(run.task.metrics).name
    return [(score.step, round(score.value(metric), 5)) for score in record.scores]


def _median(record: Record, *, refresh: bool) -> float | None:
    durations = [point.duration for point in record.points if point.refresh == refresh]
    return statistics.median(durations) if durations else None
