"""The base class of tasks whose data are in memory and are always loaded completely, also for an evaluation only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from torch_thor.training.tasks.task import Metric

if TYPE_CHECKING:  # the module of recipes imports the tasks
    from torch_thor.training.config.recipe import Recipe
    from torch_thor.training.config.run_config import RunConfig


class InMemoryTask(ABC):
    """A task with its training data in memory.

    Args:
        train: The training data, on the device to train on.
        config: The settings of the training, such as batch size and seed.
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
            device: The device of the batches.
            say: Prints a line; it is called for what is the same on every process.
            report: Prints a line; it is called for what only this process has found.

        Returns:
            The task.
        """

    @classmethod
    def open_saved(cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], changed: set[str]) -> Self:
        """Load the data for an evaluation, in the same way as for a training.

        Args:
            recipe: The recipe.
            device: The device of the batches.
            say: Prints a line, as in `open`.
            changed: Not used.

        Returns:
            The task.
        """
        return cls.open(recipe, device, say, say)

    @property
    def device(self) -> torch.device:
        """The device that batches are on."""
        return self.train.device

    def metrics(self) -> Sequence[Metric]:
        """Return the metrics of an evaluation.

        Returns:
            The metrics of the class; one of them is primary.
        """
        return self.METRICS
