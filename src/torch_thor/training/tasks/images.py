"""Image classification: labelled images in memory or files, cross-entropy, top-1, top-5 accuracy.

A loss term is an image. A batch is (images (n, C, H, W), labels (n,)). With K outputs and smoothing
s, the target distribution of a label y is

    torch        1 - s + s / K on y, s / K on every other output
    reference    1 - s on y, s / (K - 1) on every other output

so that the reference form, that of THOR's reference trainings, with s is torch's form with s · K /
(K - 1).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_thor.errors import require
from torch_thor.training.data.batches import (
    batches_per_epoch,
    held_out_keys,
    in_memory,
    loaded,
    smallest_part,
    training_keys,
)
from torch_thor.training.data.checksums import names_checksum, values_checksum
from torch_thor.training.data.small import load_images
from torch_thor.training.models.library import build_model, check_fits, check_name
from torch_thor.training.parallel import Ranks, world_size
from torch_thor.training.recipe_model import CIFAR_SETS, FOLDER, IN_MEMORY, Recipe
from torch_thor.training.tasks.task import OWN_IMAGES, Batch, Loss, Metric, Task, Terms

EVALUATION_BATCH = 1000  # images in memory
# An evaluation batch has no more images, because a recipe's batch size may be for many devices.
MOST_FROM_FILES = 256


class ImageClassification(Task):
    """The task of classifying images."""

    data_sets = (*IN_MEMORY, *CIFAR_SETS, FOLDER)
    keys = frozenset({"classes", "label_smoothing"})
    own_data = OWN_IMAGES
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
    ) -> None:
        check_name(recipe.model)
        self.recipe, self.files = recipe, recipe.data.name not in IN_MEMORY
        self.say = cache(say)  # which says each line once
        # `say` may be for the first process
        self.say_on_others = cache(partial(print, file=sys.stderr, flush=True))
        self.train: Any
        self.test: Any
        if self.files:
            # its import of torchvision's transforms is slow
            from torch_thor.training.data.images import open_images

            self.train, self.test = open_images(recipe.data, recipe.seed, train=train, say=self.say)
            self.samples, self.held_out_samples, classes = (
                len(self.train or ()),
                len(self.test),
                len(self.test.classes),
            )
        else:
            self.train, self.test = (
                [tensor.to(device) for tensor in part] for part in load_images(recipe.data)
            )
            self.samples, self.held_out_samples, classes = (
                len(self.train[1]),
                len(self.test[1]),
                int(self.train[1].max()) + 1,
            )
        self.trains, self.least = train, 1  # images of a micro-batch, of which `model` tells more
        self.steps_per_epoch = (
            batches_per_epoch(self.samples, recipe.batch_size, world_size()) if train else 0
        )
        self.outputs = recipe.classes or classes
        require(
            self.outputs >= classes,
            f"classes={recipe.classes}: the data has {classes} classes; leave classes=null, or set "
            f"{classes} or more",
        )
        most = (self.outputs - 1) / self.outputs
        require(
            recipe.smoothing_form == "torch"
            or recipe.label_smoothing == 0
            or recipe.label_smoothing < most,
            f"label_smoothing={recipe.label_smoothing} with smoothing_form=reference must be below "
            f"{most:.4g} for {self.outputs} outputs, or the label would not be the most probable "
            "one: lower it, or use smoothing_form=torch",
        )

    @cached_property
    def data_checksums(self) -> Mapping[str, str]:
        """The checksums of the images, by part: of the names of files, or else of the labels."""
        return {
            part: _checksum(images)
            for part, images in (("training data", self.train), ("evaluation data", self.test))
            if images is not None
        }

    @classmethod
    def recipe_of_evaluation(cls, recipe: Recipe, trained: Recipe) -> Recipe:
        """Crop and normalise other images as in training; those of another size are refused."""
        if not {recipe.data.name, trained.data.name} & IN_MEMORY.keys():
            data = recipe.data.model_copy(update={"transform": trained.data.crops})
            recipe = recipe.model_copy(update={"data": data})
        sizes = [" x ".join(map(str, settings.data.image_shape)) for settings in (recipe, trained)]
        require(
            sizes[0] == sizes[1],
            f"data.name={recipe.data.name} has images of {sizes[0]}, the network was trained on "
            f"{sizes[1]}: choose data of that size, or set data.transform.size",
        )
        return recipe

    def model(self) -> nn.Module:
        """Build the network, in channels_last, which makes convolutions faster on CPUs too."""
        shape = self.recipe.data.image_shape
        model = build_model(self.recipe.model, shape[0], self.outputs).to(
            memory_format=torch.channels_last
        )
        self.least = check_fits(self.recipe.model, model, shape, self.outputs)
        if self.trains:
            size, parts, world = self.recipe.batch_size, self.recipe.accumulation, world_size()
            smallest = smallest_part(size // world, parts)
            require(
                smallest >= self.least,
                f"batch_size={size} in accumulation={parts} parts on {world} processes leaves a "
                f"part of {smallest} image, of which BatchNorm in model={self.recipe.model} has no "
                f"variance ({' x '.join(map(str, shape))} pixels become a single one): raise "
                f"batch_size or lower accumulation, so that each part has {self.least} or more, or "
                "use larger images",
            )
        return model

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Return the training batches of a process."""
        keys = training_keys(self.samples, self.recipe.batch_size, self.recipe.seed, ranks, start)
        if not self.files:
            return in_memory(self.train, keys)
        parts, least = self.recipe.accumulation, self.least
        return (batch for batch, _ in self._read(self.train, keys, ranks, parts=parts, least=least))

    def held_out(self, ranks: Ranks) -> Iterable[tuple[Batch, bool]]:
        """Return the evaluation batches of a process."""
        size = min(self.recipe.batch_size, MOST_FROM_FILES) if self.files else EVALUATION_BATCH
        dealt = list(held_out_keys(self.held_out_samples, size, ranks))
        keys = [[(0, index) for index in indices] for indices, _ in dealt]
        if not self.files:
            return zip(in_memory(self.test, keys), (counts for _, counts in dealt), strict=True)
        read = self._read(self.test, keys, ranks, patient=True)
        # images in the place of a batch that cannot be read do not count
        return (
            (batch, counts and readable)
            for (batch, readable), (_, counts) in zip(read, dealt, strict=True)
        )

    def _read(
        self, images: Any, keys: Iterable[list[tuple[int, int]]], ranks: Ranks, **options: Any
    ) -> Iterator[tuple[Batch, bool]]:
        from torch_thor.training.data.images import collate, normalised

        data, crops = self.recipe.data, self.recipe.data.crops
        raw = loaded(
            images, keys, workers=data.workers.count, prefetch=data.workers.prefetch,
            device=ranks.device,
            max_broken=data.max_broken, say=self.say if ranks.first else self.say_on_others,
            collate=collate, **options,
        )  # fmt: skip
        return (
            ((normalised(pixels, crops), labels), readable) for (pixels, labels), readable in raw
        )

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
        best = scores.topk(min(5, self.outputs), dim=1).indices == labels[:, None]
        return {
            "loss": cross_entropy(scores, labels, reduction="sum"),
            "top1": (scores.argmax(dim=1) == labels).sum(),
            "top5": best.sum(),
        }


def _checksum(images: Any) -> str:
    paths = getattr(getattr(images, "source", None), "paths", None)
    if paths is not None:
        return names_checksum(paths)
    return values_checksum(images[1] if isinstance(images, list) else images.labels)
