"""Opens the task that a recipe names, and checks the settings that its task cannot use."""

from collections.abc import Callable
from importlib import import_module

import torch

from torch_thor.training.data.batches import warn_of_workers
from torch_thor.training.recipe_model import IN_MEMORY, Data, Recipe
from torch_thor.training.tasks import TASKS
from torch_thor.training.tasks.task import Task, primary

# the keys of a recipe that are of some tasks alone, and what the others lack
OF_SOME_TASKS = {
    "phases": "trains in one phase",
    "activation_checkpointing": "has no network that can",
    "classes": "has no classes",
    "label_smoothing": "has no labels",
}


def task_class(name: str) -> type[Task]:
    """Import the class of a task."""
    module, kind = TASKS[name].split(".")
    found: type[Task] = getattr(import_module(f"{__package__}.{module}"), kind)
    return found


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
    return task_class(recipe.task)(recipe, device, say, train=train)


def check_task(recipe: Recipe) -> list[str]:
    """List the faults of the settings that a task cannot use, whatever the data are."""
    name, data, faults = recipe.task, recipe.data, []
    task = task_class(name)
    if task.models and not recipe.model.endswith(task.models):
        faults.append(
            f"model={recipe.model} is not a network of task={name}: use {', '.join(task.models)}"
        )
    if task.data_sets and data.name not in task.data_sets:
        faults.append(
            f"data.name={data.name} cannot be used for task={name}: use {', '.join(task.data_sets)}"
        )
    if not task.data_sets and data != Data():
        faults.append(
            f"data is set, but task={name} always uses the language reference of Python: leave "
            "data out"
        )
    for key, lack in OF_SOME_TASKS.items():
        value, default = getattr(recipe, key), Recipe.model_fields[key].get_default()
        if key not in task.keys and value != default:
            text = str(value).lower() if isinstance(value, bool) else value
            subject = f"{key} is set" if isinstance(value, tuple) else f"{key}={text}"
            faults.append(f"{subject}: task={name} {lack}; leave {key} out")
    if primary(task.metrics).share:
        for key, values in (("stop_at", [recipe.stop_at or 0.0]), ("targets", recipe.targets)):
            if any(value > 1 for value in values):
                shown = recipe.stop_at if key == "stop_at" else list(values)
                faults.append(
                    f"{key}={shown} must lie in (0, 1]: accuracies are fractions, not per cent"
                )
    return faults
