"""The tasks that a recipe can name; a new one is new files and one line in `TASKS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from torch_thor.training.tasks.autoencoder import Autoencoder
from torch_thor.training.tasks.char_lm import CharLM
from torch_thor.training.tasks.image_classification import ImageClassification
from torch_thor.training.tasks.masked_lm import MaskedLM
from torch_thor.training.tasks.task import EvaluationTask, Metric, Task

if TYPE_CHECKING:  # a recipe asks its task what it may say
    from torch_thor.training.config.recipe import Recipe


class TaskKind(Protocol):
    """A class of tasks, before any data is looked for."""

    METRICS: tuple[Metric, ...]

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that no data could make right; imports no library of models or of images.

        Args:
            recipe: The recipe.
        """
        ...

    def open(
        self, recipe: Recipe, device: torch.device, say: Callable[[str], None], report: Callable[[str], None]
    ) -> Task:
        """Find and check the data of a recipe.

        Args:
            recipe: The recipe.
            device: Where batches go.
            say: Told, in one line each, of what every process finds alike.
            report: Told, in one line each, of what this process alone has met.

        Returns:
            The task, to train on.
        """
        ...

    def open_saved(
        self, recipe: Recipe, device: torch.device, say: Callable[[str], None], changed: set[str]
    ) -> EvaluationTask:
        """Find and check what a trained network is evaluated on.

        Args:
            recipe: The recipe, from `saved_recipe`.
            device: Where batches go.
            say: Told, in one line each, of what is odd about the data.
            changed: Keys that are not those of the training.

        Returns:
            The task, to evaluate on.
        """
        ...

    def saved_recipe(self, trained: Recipe, recipe: Recipe, changed: Sequence[str]) -> Recipe:
        """Say how a trained network is evaluated.

        Args:
            trained: The recipe of the training.
            recipe: The same with the keys that were changed.
            changed: Those keys.

        Returns:
            The recipe to evaluate with.
        """
        ...


TASKS: dict[str, TaskKind] = {
    "image-classification": ImageClassification,
    "autoencoder": Autoencoder,
    "char-lm": CharLM,
    "masked-lm": MaskedLM,
}
