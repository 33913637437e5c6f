"""Opens the task that a recipe names, and checks the settings that its task cannot use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

import torch

from torch_thor.training.recipe_model import Data, Recipe
from torch_thor.training.tasks import TASKS
from torch_thor.training.tasks.task import Task


def open_task(
    recipe: Recipe,
    device: torch.device,
    say: Callable[[str], None],
    *,
    train: bool = True,
    data: Mapping[str, Any] | None = None,
) -> Task:
    """Return the task of a recipe, whose data are found and checked.

    Args:
        recipe: The recipe.
        device: The device of the batches.
        say: Prints a line.
        train: False for an evaluation, which needs no training data.
        data: The `Task.data` of the training, for an evaluation.

    Raises:
        UserError: If the data are missing or unsuitable.
    """
    module, kind = TASKS[recipe.task].place.split(".")
    task = getattr(import_module(f"{__package__}.{module}"), kind)
    return cast(Task, task(recipe, device, say, train=train, data=data))


def check_task(recipe: Recipe) -> list[str]:
    """List the faults of the settings that a task cannot use, whatever the data are."""
    name, data, task = recipe.task, recipe.data, TASKS[recipe.task]
    others = {key for other in TASKS.values() for key in other.keys} - {*task.keys}
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
            f"data is set, but task={name} has data of its own: leave data out",
        ),
        *(
            (
                getattr(recipe, key) != Recipe.model_fields[key].get_default(),
                f"{key} is set, but task={name} does not use it: leave {key} out",
            )
            for key in sorted(others)
        ),
        *(
            (
                task.has_accuracy and max(values, default=0) > 1,
                f"{key} must lie in (0, 1], not {max(values, default=0)}: accuracies are "
                "fractions, not per cent",
            )
            for key, values in (
                ("stop_at", [recipe.stop_at or 0.0]),
                ("targets", recipe.targets),
            )
        ),
    )
    return [line for broken, line in rules if broken]
