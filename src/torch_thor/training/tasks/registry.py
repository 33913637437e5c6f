"""The tasks that a recipe can name. To add a task, write its class in a new file and add one line to `TASKS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from torch_thor.training.tasks.autoencoder import Autoencoder
from torch_thor.training.tasks.char_lm import CharLM
from torch_thor.training.tasks.image_classification import ImageClassification
from torch_thor.training.tasks.masked_lm import MaskedLM
from torch_thor.training.tasks.task import EvaluationTask, Metric, Task

if TYPE_CHECKING:  # the module of recipes imports the tasks
    from torch_thor.training.config.recipe import Recipe


class TaskKind(Protocol):
    """The class of a task, whose class methods check a recipe and open its data."""

    METRICS: tuple[Metric, ...]

    def check(self, recipe: Recipe) -> None:
        """Refuse settings that are wrong for any data, without importing libraries of models or images.

        Args:
            recipe: The recipe.

        Raises:
            UserError: If the recipe has such a setting.
        """
        ...

    def open(
        self, recipe: Recipe, device: torch.device, say: Callable[[str], None], report: Callable[[str], None]
    ) -> Task:
        """Find and check the data of a recipe.

        Args:
            recipe: The recipe.
            device: The device of the batches.
            say: Prints a line; it is called for what is the same on every process.
            report: Prints a line; it is called for what only this process has found, such as a broken image.

        Returns:
            The task, for a training.

        Raises:
            UserError: If the data are missing or unsuitable.
        """
        ...

    def open_saved(
        self, recipe: Recipe, device: torch.device, say: Callable[[str], None], changed: set[str]
    ) -> EvaluationTask:
        """Find and check the evaluation data for a trained network.

        Args:
            recipe: The recipe, from `saved_recipe`.
            device: The device of the batches.
            say: Prints a line; it is called for warnings about the data.
            changed: The first part of each key that the user has changed since the training.

        Returns:
            The task, for an evaluation.

        Raises:
            UserError: If the data are missing or unsuitable.
        """
        ...

    def saved_recipe(self, trained: Recipe, recipe: Recipe, changed: Sequence[str]) -> Recipe:
        """Return the recipe with which a trained network is evaluated.

        Args:
            trained: The recipe of the training.
            recipe: The recipe with the user's changes.
            changed: The changed keys.

        Returns:
            The recipe to evaluate with.

        Raises:
            UserError: If the network cannot be evaluated with these changes.
        """
        ...


TASKS: dict[str, TaskKind] = {
    "image-classification": ImageClassification,
    "autoencoder": Autoencoder,
    "char-lm": CharLM,
    "masked-lm": MaskedLM,
}
