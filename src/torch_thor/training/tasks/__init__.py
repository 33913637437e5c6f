"""Tasks: a task is a network, its data, its loss and its metrics. A new one is a new file, and a line in `TASKS`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from torch_thor.training.data.batches import warn_of_workers
from torch_thor.training.recipe import IN_MEMORY, Recipe
from torch_thor.training.tasks.task import Task, primary

# the class of each task; its module is imported when the task is used
TASKS = {
    "image-classification": "torch_thor.training.tasks.images.ImageClassification",
    "autoencoder": "torch_thor.training.tasks.autoencoder.Autoencoder",
    "char-lm": "torch_thor.training.tasks.char_lm.CharLM",
    "masked-lm": "torch_thor.training.tasks.masked_lm.MaskedLM",
}


def _kind(recipe: Recipe) -> Any:
    module, _, name = TASKS[recipe.task].rpartition(".")
    return getattr(import_module(module), name)


def open_task(recipe: Recipe, device: torch.device, say: Callable[[str], None], *, train: bool = True) -> Task:
    """Return the task of a recipe, whose data are found and checked.

    Args:
        recipe: The recipe.
        device: The device of the batches.
        say: Prints a line.
        train: False for an evaluation, which needs no training data.

    Raises:
        UserError: If the data are missing or unsuitable.
    """
    if recipe.data.name not in IN_MEMORY:
        warn_of_workers(recipe.data.workers.count, say)
    task: Task = _kind(recipe)(recipe, device, say, train=train)
    return task


def check_task(recipe: Recipe) -> list[str]:
    """List the faults of the settings that a task cannot use, whatever the data are."""
    kind, task = _kind(recipe), recipe.task
    faults = list(kind.faults(recipe))
    if task != "masked-lm":
        if recipe.phases:
            faults.append(f"phases is set: task={task} trains in one phase; leave phases out")
        if recipe.activation_checkpointing:
            faults.append(f"activation_checkpointing=true: task={task} has no network that can; leave it false")
    if task != "image-classification":
        if recipe.classes is not None:
            faults.append(f"classes={recipe.classes}: task={task} has no classes; leave classes=null")
        if recipe.label_smoothing:
            faults.append(f"label_smoothing={recipe.label_smoothing}: task={task} has no labels; leave it 0")
    if primary(kind.metrics).share:
        for key, values in (("stop_at", [recipe.stop_at or 0.0]), ("targets", recipe.targets)):
            if any(value > 1 for value in values):
                shown = recipe.stop_at if key == "stop_at" else list(values)
                faults.append(f"{key}={shown} must lie in (0, 1]: accuracies are fractions, not per cent")
    return faults


def wrong_model(recipe: Recipe, *models: str) -> list[str]:
    """Return the fault of a network of another task, if it is one."""
    if recipe.model in models:
        return []
    return [f"model={recipe.model} is not a network of task={recipe.task}: use {', '.join(models)}"]
