"""Image classification: labelled images in memory or from files, cross-entropy, top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training.config.data_spec import IN_MEMORY, TEXTS
from torch_thor.training.data.named import open_data, open_evaluation
from torch_thor.training.data.shards import Shard
from torch_thor.training.data.stream import BatchLoader, DataSet, EvaluationSet, Streams
from torch_thor.training.engine import parallel
from torch_thor.training.errors import require
from torch_thor.training.models.classifiers import build_model, check_fits, check_head, check_name
from torch_thor.training.tasks.checks import check_not_text
from torch_thor.training.tasks.smoothing import check_smoothing, training_loss
from torch_thor.training.tasks.task import Batch, Loss, Metric, Terms

if TYPE_CHECKING:  # a recipe asks its task what it may say
    from torch_thor.training.config.recipe import Recipe
    from torch_thor.training.config.run_config import RunConfig

BATCH = 256  # most images of an evaluation at a time where nothing else is said: those of a step may be of many devices


class ImageClassification:
    """A network that classifies images; a batch is (images (n, C, H, W), labels (n,)), a loss term an image.

    Args:
        data: The data, for the device to train on.
        config: Batch size, seed and label smoothing.
        model: The network's name; `None` where the network is there already.
        outputs: Outputs of the network, at least the classes of the data; `None` is that number.
        evaluation_batch: Images at a time where the network is only evaluated; `None` is the config's batch size.
    """

    unit: ClassVar[str] = "images"
    METRICS: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "loss", "test loss", higher_is_better=False),
        Metric("top1", "accuracy, top-1", "accuracy", higher_is_better=True, primary=True, share=True),
        Metric("top5", "accuracy, top-5", "top-5 accuracy", higher_is_better=True, share=True),
    )

    def __init__(
        self,
        data: EvaluationSet,
        config: RunConfig,
        *,
        model: str | None = None,
        outputs: int | None = None,
        evaluation_batch: int | None = None,
    ) -> None:
        self.data, self.config, self.model = data, config, model
        self.outputs = outputs or data.classes
        self.evaluation_batch = evaluation_batch or config.batch_size
        check_head(self.outputs, data.classes)
        check_smoothing(config.label_smoothing, config.smoothing_form, self.outputs)

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Refuse a recipe that no data could make right; names of library models are looked up when one is built.

        Args:
            recipe: The recipe.
        """
        require(
            recipe.data.name not in TEXTS,
            f"data.name={recipe.data.name} is text: task={recipe.task} takes images; set task=masked-lm, or other data",
        )
        check_not_text(recipe)

    @classmethod
    def open(
        cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], report: Callable[[str], None]
    ) -> ImageClassification:
        """Find and check the data of a recipe.

        Args:
            recipe: The recipe.
            device: Where batches go.
            say: Told, in one line each, of what every process finds alike.
            report: Told, in one line each, of what this process alone has met.

        Returns:
            The task.
        """
        check_name(recipe.model)
        data = open_data(recipe.data, device, say, report)
        return cls(data, recipe, model=recipe.model, outputs=recipe.classes)

    @classmethod
    def open_saved(
        cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], changed: set[str]
    ) -> ImageClassification:
        """Find and check what a trained network is evaluated on; the training images need not be there.

        Args:
            recipe: The recipe.
            device: Where batches go.
            say: Told, in one line each, of what is odd about the images.
            changed: Keys that are not those of the training.

        Returns:
            The task.
        """
        data = open_evaluation(recipe.data, device, say)
        outputs = recipe.classes or data.classes
        if "data" in changed and outputs > data.classes + 1:  # one more, which is never a label, is the reference's own
            parallel.rank_zero_print(say)(
                f"the data has {data.classes} classes, the network {outputs} outputs: classes are numbered in their "
                f"sorted order, so these must be the first {data.classes} of those that it was trained on"
            )
        batch = recipe.batch_size if "batch_size" in changed else min(recipe.batch_size, BATCH)
        return cls(data, recipe, model=recipe.model, outputs=outputs, evaluation_batch=batch)

    @classmethod
    def saved_recipe(cls, trained: Recipe, recipe: Recipe, changed: Sequence[str]) -> Recipe:
        """Read other images in the way that the network was trained with, unless the user chooses another one.

        Args:
            trained: The recipe of the training.
            recipe: The same with the keys that were changed.
            changed: Those keys.

        Returns:
            The recipe to evaluate with.
        """
        if any(key.startswith("data.transform") for key in changed):
            return recipe
        data = recipe.data
        if data.name not in IN_MEMORY and trained.data.name not in IN_MEMORY:
            data = replace(data, transform=trained.data.crops)  # not those that are usual for the other data set
        sizes = [" x ".join(map(str, shape)) for shape in (data.image_shape, trained.data.image_shape)]
        require(
            sizes[0] == sizes[1],
            f"data.name={data.name} has images of {sizes[0]}, the network was trained on {sizes[1]}: evaluate it on "
            f"data like those, or read images at another size with data.transform.size",
        )
        return replace(recipe, data=data)

    @property
    def device(self) -> torch.device:
        """The device that batches are on."""
        return self.data.device

    def build_model(self) -> nn.Module:
        """Build the network with torch's global random numbers (seed them first).

        Returns:
            The network, on the CPU; convolutions are faster in channels_last, on a CPU too, for every optimizer alike.
        """
        assert self.model is not None
        model = build_model(self.model, self.data.image_shape[0], self.outputs)
        model = model.to(memory_format=torch.channels_last)
        check_fits(self.model, model, self.data.image_shape, self.outputs)
        return model

    def open_data(self, shard: Shard) -> Streams:
        """Open the images from the beginning.

        Args:
            shard: Which rank of how many.

        Returns:
            Training batches and evaluation batches.
        """
        data = cast(DataSet, self.data)
        return data.open(batch_size=self.config.batch_size, seed=self.config.seed, shard=shard)

    def open_evaluation(self, shard: Shard) -> BatchLoader:
        """Open the evaluation images alone.

        Args:
            shard: Which rank of how many.

        Returns:
            The rank's batches.
        """
        return self.data.open_evaluation(batch_size=self.evaluation_batch, shard=shard)

    def terms(self, batch: Batch) -> Terms:
        """Count images.

        Args:
            batch: Images and labels.

        Returns:
            Their number.
        """
        return Terms(len(batch[1]))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean cross-entropy against smoothed labels.

        Args:
            model: The network.
            batch: Images and labels.

        Returns:
            The loss, and the scores (n, outputs).
        """
        images, labels = batch
        scores = model(images)
        return Loss(training_loss(scores, labels, self.config.label_smoothing, self.config.smoothing_form), scores)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sum up the cross-entropy without smoothing, and count the images classified rightly.

        Args:
            model: The network.
            batch: Images and labels, one or more.

        Returns:
            `loss`, `top1` and `top5`; with fewer than five outputs, top-5 is top-`outputs`.
        """
        images, labels = batch
        scores = model(images)
        best = scores.topk(min(5, self.outputs), dim=1).indices == labels[:, None]
        return {
            "loss": functional.cross_entropy(scores, labels, reduction="sum"),
            "top1": (scores.argmax(dim=1) == labels).sum(),
            "top5": best.any(dim=1).sum(),
        }

    def metrics(self) -> Sequence[Metric]:
        """Name what an evaluation gives.

        Returns:
            Loss and accuracies; top-1 decides.
        """
        return self.METRICS
