"""A deep autoencoder of small images, a standard benchmark of the K-FAC literature.

The training loss is the cross-entropy summed over the pixels of an image (Martens and Grosse 2015, section 13). The
primary metric is the squared error of the reconstructions. A loss term is an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training.config.data_spec import IN_MEMORY
from torch_thor.training.data.in_memory import EVALUATION_BATCH, load_data
from torch_thor.training.data.shards import EvaluationOrder, Shard, TrainingOrder, WholeBatches
from torch_thor.training.data.stream import BatchLoader, MemoryLoader, Streams, TrainingStream
from torch_thor.training.errors import require
from torch_thor.training.models.autoencoder import deep_autoencoder
from torch_thor.training.tasks.checks import check_not_images
from torch_thor.training.tasks.in_memory import InMemoryTask
from torch_thor.training.tasks.task import Batch, Loss, Metric, Terms

if TYPE_CHECKING:  # the module of recipes imports the tasks
    from torch_thor.training.config.recipe import Recipe
    from torch_thor.training.config.run_config import RunConfig

MODELS = ("deep-autoencoder",)
MOST_HELD_OUT = 2000  # images of the test set that are used for evaluations


class Autoencoder(InMemoryTask):
    """The task of reconstructing images. A batch is a tensor of pixel values in [0, 1], (n, pixels).

    Args:
        train: Training images, (N, pixels), on the device to train on.
        held_out: Evaluation images, (M, pixels), on the same device.
        config: The settings of the training, such as batch size and seed.
    """

    unit: ClassVar[str] = "images"
    METRICS: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "cross-entropy", "test loss", higher_is_better=False),
        Metric("squared_error", "squared error", "squared error", higher_is_better=False, primary=True),
    )

    def __init__(self, train: Tensor, held_out: Tensor, config: RunConfig) -> None:
        super().__init__(train, config)
        self.held_out = held_out

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
            recipe.data.name in IN_MEMORY,
            f"data.name={recipe.data.name} cannot be used for task={recipe.task}: use one of {', '.join(IN_MEMORY)}",
        )

    @classmethod
    def open(
        cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], report: Callable[[str], None]
    ) -> Self:
        """Load the images.

        Args:
            recipe: The recipe.
            device: The device of the batches.
            say: Not used, because there is nothing to report.
            report: Not used either.

        Returns:
            The task.
        """
        data = load_data(recipe.data)
        low, high = data.train_images.min(), data.train_images.max()
        images = (data.train_images, data.test_images[:MOST_HELD_OUT])
        train, held_out = (((x.flatten(1) - low) / (high - low)).to(device) for x in images)
        return cls(train, held_out, recipe)

    @classmethod
    def saved_recipe(cls, trained: Recipe, recipe: Recipe, changed: Sequence[str]) -> Recipe:
        """Refuse images of another size than those of the training.

        Args:
            trained: The recipe of the training.
            recipe: The recipe with the user's changes.
            changed: The changed keys.

        Returns:
            The recipe to evaluate with.

        Raises:
            UserError: If the images have another size.
        """
        sizes = [" x ".join(map(str, one.data.image_shape)) for one in (recipe, trained)]
        require(
            sizes[0] == sizes[1],
            f"data.name={recipe.data.name} has images of {sizes[0]}, the network was trained on {sizes[1]}: choose "
            f"data with images of that size",
        )
        return recipe

    def build_model(self) -> nn.Module:
        """Build the network with torch's global random numbers (seed them first).

        Returns:
            The network, on the CPU.
        """
        return deep_autoencoder(self.train.shape[1])

    def open_data(self, shard: Shard) -> Streams:
        """Open the images at the beginning of a training.

        Args:
            shard: Rank and number of ranks.

        Returns:
            Training batches and evaluation batches.
        """
        order = TrainingOrder(len(self.train), self.config.batch_size, self.config.seed, shard)
        evaluation = EvaluationOrder(len(self.held_out), EVALUATION_BATCH, shard)
        return Streams(TrainingStream(MemoryLoader(self.train, order), order), MemoryLoader(self.held_out, evaluation))

    def open_evaluation(self, shard: Shard) -> BatchLoader:
        """Open the held-out images only.

        Args:
            shard: Rank and number of ranks.

        Returns:
            The rank's batches.
        """
        return MemoryLoader(self.held_out, WholeBatches(len(self.held_out), EVALUATION_BATCH, shard))

    def terms(self, batch: Batch) -> Terms:
        """Count the images of a batch, which are its loss terms.

        Args:
            batch: Pixels, (n, pixels).

        Returns:
            The number of images.
        """
        return Terms(len(batch))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the cross-entropy, summed over the pixels of an image and averaged over images.

        Args:
            model: The network.
            batch: Pixels, (n, pixels).

        Returns:
            The loss, and the logits.
        """
        logits = model(batch)
        return Loss(_cross_entropy(logits, batch) / len(batch), logits, "bernoulli")

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the sums of the cross-entropy and of the squared error over a batch.

        Args:
            model: The network.
            batch: Pixels, (n, pixels).

        Returns:
            `loss` and `squared_error`, both summed over the images and their pixels.
        """
        logits = model(batch)
        return {
            "loss": _cross_entropy(logits, batch),
            "squared_error": (torch.sigmoid(logits) - batch).square().sum(1).sum(),
        }


def _cross_entropy(logits: Tensor, pixels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, pixels, reduction="sum")
