"""Opens the task that a recipe names, and checks the settings that its task cannot use."""

from collections.abc import Callable
from importlib import import_module

import torch

from torch_thor.training.data.batches import check_workers
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
    task: type[Task] = getattr(import_module(f"{__package__}.{module}"), kind)
    return task


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
        check_workers(recipe.data.workers.count, say)
    return task_class(recipe.task)(recipe, device, say, train=train)


def check_task(recipe: Recipe) -> list[str]:
    """List the faults of the settings that a task cannot use, whatever the data are."""
    name, data, task = recipe.task, recipe.data, task_class(recipe.task)
    rules = (
        (
            task.models != () and not recipe.model.endswith(task.models),
            f"model={recipe.model} is not a network of task={name}: use {', '.join(task.models)}",
        ),
        (
            task.data_sets != () and data.name not in task.data_sets,
            f"data.name={data.name} cannot be used for task={name}: use "
            f"{', '.join(task.data_sets)}",
        ),
        (
            task.data_sets == () and data != Data(),
            f"data is set, but task={name} always uses the language reference of Python: leave "
            "data out",
        ),
        *(
            (
                key not in task.keys
                and getattr(recipe, key) != Recipe.model_fields[key].get_default(),
                f"{_setting(key, getattr(recipe, key))}: task={name} {lack}; leave {key} out",
            )
            for key, lack in OF_SOME_TASKS.items()
        ),
        *(
            (
                primary(task.metrics).share and max(values, default=0) > 1,
                f"{key}={shown} must lie in (0, 1]: accuracies are fractions, not per cent",
            )
            for key, shown, values in (
                ("stop_at", recipe.stop_at, [recipe.stop_at or 0.0]),
                ("targets", list(recipe.targets), recipe.targets),
            )
        ),
    )
    return [line for broken, line in rules if broken]


def _setting(key: str, value: object) -> str:
    """Write a setting in a few words."""
    text = str(value).lower() if isinstance(value, bool) else value
    return f"{key} is set" if isinstance(value, tuple) else f"{key}={text}"
