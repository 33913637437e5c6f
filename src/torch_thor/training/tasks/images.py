"""Image classification: labelled images in memory or files, cross-entropy, top-1, top-5 accuracy.

A loss term is an image. A batch is (images (n, C, H, W), labels (n,)). With K outputs and smoothing
s, the target distribution of a label y is

    torch        1 - s + s / K on y, s / K on every other output
    reference    1 - s on y, s / (K - 1) on every other output

so that the reference form (of THOR's reference trainings) with s is torch's form with s · K /
(K - 1).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_thor.errors import is_first_rank, require
from torch_thor.training.data.batches import (
    Key,
    batches_per_epoch,
    held_out_keys,
    in_memory,
    loaded,
    training_keys,
)
from torch_thor.training.data.small import CLASSES, load_images
from torch_thor.training.models.library import build_model, check_fits
from torch_thor.training.parallel import Ranks, world_size
from torch_thor.training.recipe_model import IN_MEMORY, Recipe
from torch_thor.training.tasks.task import Batch, Loss, Metric, Task, Terms

EVALUATION_BATCH = 1000  # images in memory
# An evaluation batch has no more images, because a recipe's batch size may be for many devices.
MOST_FROM_FILES = 256


class ImageClassification(Task):
    """The task of classifying images."""

    train: Any  # `Images`, or [images, labels] in memory; so is `test`
    test: Any
    unit = "images"
    metrics: Sequence[Metric] = (
        Metric("loss", "loss", "held-out loss", higher_is_better=False),
        Metric(
            "top1", "accuracy, top-1", "accuracy", higher_is_better=True, primary=True, share=True
        ),
        Metric("top5", "accuracy, top-5", "top-5 accuracy", higher_is_better=True, share=True),
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
        self.recipe, self.files = recipe, recipe.data.name not in IN_MEMORY
        # each process tells once of each image that it cannot read
        self.say = cache(say if is_first_rank() else partial(print, file=sys.stderr))
        classes: Sequence[str] | None = None if data is None else data["classes"]
        if self.files:
            # its import of torchvision's transforms is slow
            from torch_thor.training.data.images import open_images

            self.train, self.test = open_images(
                recipe.data, recipe.seed, train=train, classes=classes, say=say
            )
            self.data = (self.train if train else self.test).data
        else:
            self.train, self.test = (
                [tensor.to(device) for tensor in part] for part in load_images(recipe.data)
            )
            self.data = {"samples": len(self.train[1]), "classes": CLASSES[recipe.data.name]}
            require(
                classes in (None, self.data["classes"]),
                f"data.name={recipe.data.name} has other classes than the data of the training: "
                "choose those, or others with the same classes",
            )
        self.steps_per_epoch = (
            batches_per_epoch(self.data["samples"], recipe.batch_size, world_size()) if train else 0
        )
        number = len(self.data["classes"])
        self.outputs = recipe.classes or number
        require(
            self.outputs >= number,
            f"classes={recipe.classes}: the data has {number} classes; leave classes=null, or set "
            f"{number} or more",
        )

    def model(self) -> nn.Module:
        """Build the network, in channels_last, which makes convolutions faster on CPUs too."""
        shape = self.recipe.data.image_shape
        model = build_model(self.recipe.model, shape[0], self.outputs).to(
            memory_format=torch.channels_last
        )
        check_fits(self.recipe.model, model, shape, self.outputs)
        return model

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Return the training batches of a process."""
        keys = training_keys(
            self._count(self.train), self.recipe.batch_size, self.recipe.seed, ranks, start
        )
        return self._read(self.train, keys, ranks)

    def held_out(self, ranks: Ranks) -> Iterable[tuple[Batch, bool]]:
        """Return the evaluation batches of a process."""
        size = min(self.recipe.batch_size, MOST_FROM_FILES) if self.files else EVALUATION_BATCH
        dealt = list(held_out_keys(self._count(self.test), size, ranks))
        read = self._read(self.test, [[(0, i) for i in indices] for indices, _ in dealt], ranks)
        return zip(read, (counts for _, counts in dealt), strict=True)

    def _count(self, images: Any) -> int:
        return len(images if self.files else images[1])

    def _read(self, images: Any, keys: Iterable[list[Key]], ranks: Ranks) -> Iterator[Batch]:
        """Return the batches of some keys."""
        if not self.files:
            return in_memory(images, keys)
        from torch_thor.training.data.images import collate, normalised

        data = self.recipe.data
        raw = loaded(
            images, keys, workers=data.workers.count, prefetch=data.workers.prefetch,
            device=ranks.device, max_broken=data.max_broken, say=self.say, collate=collate,
        )  # fmt: skip
        return ((normalised(x, data.crops), labels) for x, labels in raw)

    def terms(self, batch: Batch) -> Terms:
        """Count the images."""
        return Terms(len(batch[1]))

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Compute the mean cross-entropy against smoothed labels."""
        images, labels = batch
        scores, smoothing = net(images), self.recipe.label_smoothing
        if smoothing and self.recipe.smoothing_form == "reference":
            smoothing *= self.outputs / (self.outputs - 1)
        return Loss(cross_entropy(scores, labels, label_smoothing=smoothing), scores)

    def measure(self, net: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the summed unsmoothed cross-entropy, and counts of correctly classified images."""
        images, labels = batch
        scores = net(images)
        return {
            "loss": cross_entropy(scores, labels, reduction="sum"),
            "top1": (scores.argmax(dim=1) == labels).sum(),
            "top5": (scores.topk(min(5, self.outputs)).indices == labels[:, None]).sum(),
        }
