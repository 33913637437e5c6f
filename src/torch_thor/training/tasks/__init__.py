"""Tasks: a task is a network, its data, its loss and its metrics.

A new one is a new file, and a line in `TASKS`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch

from torch_thor.training.data.batches import warn_of_workers
from torch_thor.training.models.bert import BERTS, CONFIGURATION
from torch_thor.training.recipe import CIFAR_SETS, FOLDER, IN_MEMORY, TEXTS, Data, Recipe
from torch_thor.training.tasks.task import Task


class Kind(NamedTuple):
    """What is known of a task before it is opened."""

    place: str  # of its class, whose module is imported when the task is used
    models: tuple[str, ...] = ()  # its networks or their suffix; none: those of `models.library`
    data: tuple[str, ...] = ()  # its data sets; none: it has one of its own
    is_share: bool = False  # whether its primary metric is a fraction


TASKS = {
    "image-classification": Kind(
        "images.ImageClassification", (), (*IN_MEMORY, *CIFAR_SETS, FOLDER), True
    ),
    "autoencoder": Kind("autoencoder.Autoencoder", ("deep-autoencoder",), (*IN_MEMORY,)),
    "char-lm": Kind("char_lm.CharLM", ("char-transformer",)),
    "masked-lm": Kind("masked_lm.MaskedLM", (*BERTS, CONFIGURATION), TEXTS, True),
}


def open_task(
    recipe: Recipe, device: torch.device, say: Callable[[str], None], *, train: bool = True
) -> Task:
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
    module, name = TASKS[recipe.task].place.split(".")
    task: Task = getattr(import_module(f"{__name__}.{module}"), name)(
        recipe, device, say, train=train
    )
    return task


def check_task(recipe: Recipe) -> list[str]:
    """List the faults of the settings that a task cannot use, whatever the data are."""
    task, data, faults = recipe.task, recipe.data, []
    kind = TASKS[task]
    if kind.models and not recipe.model.endswith(kind.models):
        faults.append(
            f"model={recipe.model} is not a network of task={task}: use {', '.join(kind.models)}"
        )
    if kind.data and data.name not in kind.data:
        faults.append(
            f"data.name={data.name} cannot be used for task={task}: use {', '.join(kind.data)}"
        )
    if not kind.data and data != Data():
        faults.append(
            f"data is set, but task={task} always uses the language reference of Python: leave "
            "data out"
        )
    if task != "masked-lm":
        if recipe.phases:
            faults.append(f"phases is set: task={task} trains in one phase; leave phases out")
        if recipe.activation_checkpointing:
            faults.append(
                f"activation_checkpointing=true: task={task} has no network that can; leave it "
                "false"
            )
    if task != "image-classification":
        if recipe.classes is not None:
            faults.append(
                f"classes={recipe.classes}: task={task} has no classes; leave classes=null"
            )
        if recipe.label_smoothing:
            faults.append(
                f"label_smoothing={recipe.label_smoothing}: task={task} has no labels; leave it 0"
            )
    if kind.is_share:
        for key, values in (("stop_at", [recipe.stop_at or 0.0]), ("targets", recipe.targets)):
            if any(value > 1 for value in values):
                shown = recipe.stop_at if key == "stop_at" else list(values)
                faults.append(
                    f"{key}={shown} must lie in (0, 1]: accuracies are fractions, not per cent"
                )
    return faults
