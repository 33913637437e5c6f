"""Checks of recipes that all tasks except image classification share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_thor.training.errors import require

if TYPE_CHECKING:  # the module of recipes imports the tasks
    from torch_thor.training.config.recipe import Recipe


def check_not_images(recipe: Recipe, models: Sequence[str]) -> None:
    """Refuse a network of another task, and settings that only a classifier uses.

    Args:
        recipe: The recipe.
        models: The networks of its task.

    Raises:
        UserError: If the recipe has such a network or setting.
    """
    task = recipe.task
    require(
        recipe.model in models,
        f"model={recipe.model} is not a network of task={task}: use {', '.join(models)}",
    )
    check_no_classes(recipe)
    check_not_text(recipe)


def check_not_text(recipe: Recipe) -> None:
    """Refuse what only a masked language model has a use for.

    Args:
        recipe: The recipe.
    """
    task = recipe.task
    require(not recipe.phases, f"phases is set: task={task} trains in one phase; leave phases out")
    require(
        not recipe.activation_checkpointing,
        f"activation_checkpointing=true: task={task} has no network that can; leave activation_checkpointing=false",
    )


def check_no_classes(recipe: Recipe) -> None:
    """Refuse settings that only a classifier uses.

    Args:
        recipe: The recipe.

    Raises:
        UserError: If the recipe has such a setting.
    """
    task = recipe.task
    require(recipe.classes is None, f"classes={recipe.classes}: task={task} has no classes; leave classes=null")
    require(
        recipe.label_smoothing == 0,
        f"label_smoothing={recipe.label_smoothing}: task={task} has no label smoothing; leave label_smoothing=0",
    )
