"""A character language model of the language reference that is part of Python. A loss term is a predicted character."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training.config.data_spec import DataSpec
from torch_thor.training.data.python_text import SYMBOLS, WindowLoader, WindowOrder, characters, windows
from torch_thor.training.data.shards import EvaluationOrder, Shard, WholeBatches
from torch_thor.training.data.stream import BatchLoader, MemoryLoader, Streams, TrainingStream
from torch_thor.training.errors import require
from torch_thor.training.models.char_transformer import CharTransformer
from torch_thor.training.tasks.checks import check_not_images
from torch_thor.training.tasks.in_memory import InMemoryTask
from torch_thor.training.tasks.task import Batch, Loss, Metric, Terms

if TYPE_CHECKING:  # the module of recipes imports the tasks
    from torch_thor.training.config.recipe import Recipe
    from torch_thor.training.config.run_config import RunConfig

MODELS = ("char-transformer",)
CONTEXT = 64  # characters per window
EVALUATION_BATCH = 64  # windows per batch


class CharLM(InMemoryTask):
    """The task of predicting the next character. A batch is (characters, next characters), (n, CONTEXT) each, int64.

    Args:
        train: The training text as character codes, (length,), on the device to train on.
        held_out: The evaluation text as character codes, on the same device.
        config: The settings of the training, such as batch size (in windows) and seed.
    """

    unit: ClassVar[str] = "characters"
    METRICS: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "loss", "held-out loss", higher_is_better=False, primary=True),
        Metric(
            "perplexity",
            "perplexity",
            "perplexity",
            higher_is_better=False,
            derived=lambda means: math.exp(min(means["loss"], 700.0)),  # exp(700) is about the largest float
        ),
    )

    def __init__(self, train: Tensor, held_out: Tensor, config: RunConfig) -> None:
        super().__init__(train, config)
        starts = torch.arange(0, len(held_out) - CONTEXT - 1, CONTEXT, device=held_out.device)
        self.held_out = windows(held_out, starts, CONTEXT)

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Refuse settings that this task does not use.

        Args:
            recipe: The recipe.

        Raises:
            UserError: If the recipe has such a setting.
        """
        check_not_images(recipe, MODELS)
        require(
            recipe.data == DataSpec(),
            f"data is set, but task={recipe.task} always uses the language reference of Python: leave data out",
        )

    @classmethod
    def open(
        cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], report: Callable[[str], None]
    ) -> Self:
        """Read the text.

        Args:
            recipe: The recipe.
            device: The device of the batches.
            say: Not used, because there is nothing to report.
            report: Not used either.

        Returns:
            The task.
        """
        train, held_out = (codes.to(device) for codes in characters())
        return cls(train, held_out, recipe)

    @classmethod
    def saved_recipe(cls, trained: Recipe, recipe: Recipe, changed: Sequence[str]) -> Recipe:
        """Return the recipe unchanged, because there is only one text.

        Args:
            trained: The recipe of the training.
            recipe: The recipe with the user's changes.
            changed: The changed keys.

        Returns:
            The recipe to evaluate with.
        """
        return recipe

    def build_model(self) -> nn.Module:
        """Build the network with torch's global random numbers (seed them first).

        Returns:
            The network, on the CPU.
        """
        return CharTransformer(SYMBOLS, CONTEXT)

    def open_data(self, shard: Shard) -> Streams:
        """Open the text at the beginning of a training.

        Args:
            shard: Rank and number of ranks.

        Returns:
            Training batches and evaluation batches.
        """
        order = WindowOrder(
            len(self.train) // CONTEXT,
            self.config.batch_size,
            self.config.seed,
            shard,
            positions=len(self.train) - CONTEXT,
        )
        evaluation = EvaluationOrder(len(self.held_out[0]), EVALUATION_BATCH, shard)
        return Streams(
            TrainingStream(WindowLoader(self.train, CONTEXT, order), order), MemoryLoader(self.held_out, evaluation)
        )

    def open_evaluation(self, shard: Shard) -> BatchLoader:
        """Open the held-out text only.

        Args:
            shard: Rank and number of ranks.

        Returns:
            The rank's batches.
        """
        return MemoryLoader(self.held_out, WholeBatches(len(self.held_out[0]), EVALUATION_BATCH, shard))

    def terms(self, batch: Batch) -> Terms:
        """Count the predicted characters of a batch, which are its loss terms.

        Args:
            batch: Characters and next characters.

        Returns:
            The number of characters.
        """
        return Terms(batch[1].numel())

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the mean cross-entropy of the next characters.

        Args:
            model: The network.
            batch: Characters and next characters.

        Returns:
            The loss, and the logits (n · CONTEXT, SYMBOLS).
        """
        scores = model(batch[0]).flatten(0, 1)
        return Loss(functional.cross_entropy(scores, batch[1].flatten()), scores)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the sum of the cross-entropy of the next characters.

        Args:
            model: The network.
            batch: Characters and next characters.

        Returns:
            The sum, as `loss`.
        """
        scores = model(batch[0]).flatten(0, 1)
        return {"loss": functional.cross_entropy(scores, batch[1].flatten(), reduction="sum")}
