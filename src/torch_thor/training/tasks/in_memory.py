"""The base class of tasks whose data are always in memory, and are all needed for an evaluation alone too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from torch_thor.training.tasks.task import Metric

if TYPE_CHECKING:  # a recipe asks its task what it may say
    from torch_thor.training.config.recipe import Recipe
    from torch_thor.training.config.run_config import RunConfig


class InMemoryTask(ABC):
    """Training data on a device, with the settings of the training.

    Args:
        train: What is trained on, on the device to train on.
        config: Batch size and seed.
    """

    METRICS: ClassVar[tuple[Metric, ...]]

    def __init__(self, train: Tensor, config: RunConfig) -> None:
        self.train, self.config = train, config

    @classmethod
    @abstractmethod
    def open(
        cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], report: Callable[[str], None]
    ) -> Self:
        """Load the data.

        Args:
            recipe: The recipe.
            device: Where batches go.
            say: Not called: the data are complete, or loading them raises an error.
            report: Not called either.

        Returns:
            The task.
        """

    @classmethod
    def open_saved(cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], changed: set[str]) -> Self:
        """Load the data for an evaluation: the same as for a training, since what is held out comes with the rest.

        Args:
            recipe: The recipe.
            device: Where batches go.
            say: As for `open`.
            changed: Makes no difference.

        Returns:
            The task.
        """
        return cls.open(recipe, device, say, say)

    @property
    def device(self) -> torch.device:
        """The device that batches are on."""
        return self.train.device

    def metrics(self) -> Sequence[Metric]:
        """Name what an evaluation gives.

        Returns:
            The metrics of the class, one of them primary.
        """
        return self.METRICS
