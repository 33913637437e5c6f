"""Trains a recipe for a comparison, in this process and without writing files."""

from collections.abc import Sequence
from typing import Any

from torch_thor.bench.machine import describe
from torch_thor.training.config.recipe_files import load_recipe
from torch_thor.training.config.recipe_text import recipe_yaml
from torch_thor.training.data.named import open_data
from torch_thor.training.engine.loop import Run, train
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.errors import DivergedError
from torch_thor.training.experiment import image_run as new_run


def train_recipe(name: str, optimizer: str, overrides: Sequence[str]) -> tuple[Run, dict[str, Any]]:
    """Train a recipe once.

    Args:
        name: The name of the recipe.
        optimizer: The name of one of its optimizers.
        overrides: Overrides `key=value`, as for `torch-thor train`.

    Returns:
        The run, and its history as JSON values. `failure` is the message of the error if the training has diverged,
        which counts as a result; each of the `evaluations` is (step, accuracy, seconds).
    """
    recipe = load_recipe(name, [f"optimizer={optimizer}", *overrides])
    run = new_run(recipe, optimizer, open_data(recipe.data, resolve_device(recipe.device), print))
    failure = None
    try:
        train(run)
    except DivergedError as error:
        failure = str(error)
    record = run.record
    return run, {
        "steps": run.total_steps,
        "failure": failure,
        "evaluations": [[point.step, point.top1, round(point.seconds, 2)] for point in record.evaluations],
        "loss": [round(point.loss, 5) for point in record.steps],
        "seconds_ordinary_step": record.median_duration(refresh=False),
        "seconds_refresh_step": record.median_duration(refresh=True),
        "machine": describe(),
        "recipe": recipe_yaml(recipe),
    }
