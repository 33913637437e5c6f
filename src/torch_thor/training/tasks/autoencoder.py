"""A deep autoencoder of small images, a standard benchmark of the K-FAC literature.

The training loss is the cross-entropy summed over the pixels of an image (Martens and Grosse 2015,
section 13). The primary metric is the squared error of the reconstructions. A loss term is an
image. A batch is a tensor of pixel values in [0, 1], (n, pixels).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from torch_thor.training.data.batches import (
    batches_per_epoch,
    held_out_keys,
    in_memory,
    take,
    training_keys,
)
from torch_thor.training.data.small import load_images
from torch_thor.training.models.small import deep_autoencoder
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.tasks.task import Batch, Loss, Metric, Task, Terms

MOST_HELD_OUT = 2000  # images of the test set that are used for evaluations
EVALUATION_BATCH = 1000


class Autoencoder(Task):
    """The task of reconstructing images."""

    unit = "images"
    metrics: Sequence[Metric] = (
        Metric("loss", "cross-entropy", "held-out loss", higher_is_better=False),
        Metric(
            "squared_error", "squared error", "squared error", higher_is_better=False, primary=True
        ),
    )

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        say: Callable[[str], None],
        *,
        train: bool = True,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        train_set, test_set = (images.flatten(1) for images, _ in load_images(recipe.data))
        low, high = train_set.aminmax()
        self.train, self.test = (
            ((pixels - low) / (high - low)).to(device)
            for pixels in (train_set, test_set[:MOST_HELD_OUT])
        )
        self.recipe, self.data = recipe, {"samples": len(self.train)}
        self.steps_per_epoch = batches_per_epoch(len(self.train), recipe.batch_size)

    def model(self) -> nn.Module:
        """Build the network."""
        return deep_autoencoder(self.train.shape[1])

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Return the training batches of a process."""
        keys = training_keys(
            len(self.train), self.recipe.batch_size, self.recipe.seed, ranks, start
        )
        return in_memory(self.train, keys)

    def held_out(self, ranks: Ranks) -> Iterable[tuple[Batch, bool]]:
        """Return the evaluation batches of a process."""
        for indices, counts in held_out_keys(len(self.test), EVALUATION_BATCH, ranks):
            yield take(self.test, indices), counts

    def terms(self, batch: Batch) -> Terms:
        """Count the images."""
        return Terms(len(batch))

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Compute the cross-entropy, summed over an image's pixels and averaged over images."""
        logits = net(batch)
        total = binary_cross_entropy_with_logits(logits, batch, reduction="sum")
        return Loss(total / len(batch), logits, "bernoulli")

    def measure(self, net: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the cross-entropy and the squared error, summed over images and pixels."""
        logits = net(batch)
        total = binary_cross_entropy_with_logits(logits, batch, reduction="sum")
        return {
            "loss": total,
            "squared_error": (torch.sigmoid(logits) - batch).square().sum(1).sum(),
        }
