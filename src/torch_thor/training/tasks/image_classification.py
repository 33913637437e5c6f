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

if TYPE_CHECKING:  # the module of recipes imports the tasks
    from torch_thor.training.config.recipe import Recipe
    from torch_thor.training.config.run_config import RunConfig

BATCH = 256  # default limit on an evaluation batch, because the batch size of a recipe may be that of many devices


class ImageClassification:
    """The task of classifying images. A batch is (images (n, C, H, W), labels (n,)), and a loss term is an image.

    Args:
        data: The data set, whose batches are on the device to train on.
        config: The settings of the training, such as batch size, seed and label smoothing.
        model: The name of the network; `None` if the task does not build it.
        outputs: Number of outputs of the network; `None` stands for the number of classes, which is also the minimum.
        evaluation_batch: Images per batch if the network is only evaluated; `None` stands for the batch size of
            `config`.

    Raises:
        UserError: If there are fewer outputs than classes, or the label smoothing is too large.
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
        """Refuse settings that are wrong for any data. The name of a library's model is checked when it is built.

        Args:
            recipe: The recipe.

        Raises:
            UserError: If the recipe has such a setting.
        """
        require(
            recipe.data.name not in TEXTS,
            f"data.name={recipe.data.name} is text, and task={recipe.task} needs images: set task=masked-lm, or choose "
            "other data",
        )
        check_not_text(recipe)

    @classmethod
    def open(
        cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], report: Callable[[str], None]
    ) -> ImageClassification:
        """Find and check the data of a recipe.

        Args:
            recipe: The recipe.
            device: The device of the batches.
            say: Prints a line; it is called for what is the same on every process.
            report: Prints a line; it is called for what only this process has found, such as a broken image.

        Returns:
            The task.

        Raises:
            UserError: If there is no such network, or the data are missing or unsuitable.
        """
        check_name(recipe.model)
        data = open_data(recipe.data, device, say, report)
        return cls(data, recipe, model=recipe.model, outputs=recipe.classes)

    @classmethod
    def open_saved(
        cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], changed: set[str]
    ) -> ImageClassification:
        """Find and check the evaluation images for a trained network. The training images need not exist.

        Args:
            recipe: The recipe.
            device: The device of the batches.
            say: Prints a line; it is called for warnings about the images.
            changed: The first part of each key that the user has changed since the training.

        Returns:
            The task.

        Raises:
            UserError: If the data are missing or have more classes than the network has outputs.
        """
        data = open_evaluation(recipe.data, device, say)
        outputs = recipe.classes or data.classes
        if "data" in changed and outputs > data.classes + 1:  # the reference ResNet-50 has one unused output
            parallel.rank_zero_print(say)(
                f"the data has {data.classes} classes, and the network {outputs} outputs: classes are numbered in "
                f"their sorted order, so they must be the first {data.classes} classes of the training"
            )
        batch = recipe.batch_size if "batch_size" in changed else min(recipe.batch_size, BATCH)
        return cls(data, recipe, model=recipe.model, outputs=outputs, evaluation_batch=batch)

    @classmethod
    def saved_recipe(cls, trained: Recipe, recipe: Recipe, changed: Sequence[str]) -> Recipe:
        """Use the crops and the normalisation of the training for other images, unless the user changes them.

        Args:
            trained: The recipe of the training.
            recipe: The recipe with the user's changes.
            changed: The changed keys.

        Returns:
            The recipe to evaluate with.

        Raises:
            UserError: If the images have another size than those of the training.
        """
        if any(key.startswith("data.transform") for key in changed):
            return recipe
        data = recipe.data
        if data.name not in IN_MEMORY and trained.data.name not in IN_MEMORY:
            data = replace(data, transform=trained.data.crops)  # instead of the usual ones of the other data set
        sizes = [" x ".join(map(str, shape)) for shape in (data.image_shape, trained.data.image_shape)]
        require(
            sizes[0] == sizes[1],
            f"data.name={data.name} has images of {sizes[0]}, the network was trained on {sizes[1]}: choose data with "
            f"images of that size, or set data.transform.size",
        )
        return replace(recipe, data=data)

    @property
    def device(self) -> torch.device:
        """The device that batches are on."""
        return self.data.device

    def build_model(self) -> nn.Module:
        """Build the network with torch's global random numbers (seed them first).

        Returns:
            The network, on the CPU, in channels_last, which makes convolutions faster on CPUs too.
        """
        assert self.model is not None
        model = build_model(self.model, self.data.image_shape[0], self.outputs)
        model = model.to(memory_format=torch.channels_last)
        check_fits(self.model, model, self.data.image_shape, self.outputs)
        return model

    def open_data(self, shard: Shard) -> Streams:
        """Open the images at the beginning of a training.

        Args:
            shard: Rank and number of ranks.

        Returns:
            Training batches and evaluation batches.
        """
        data = cast(DataSet, self.data)
        return data.open(batch_size=self.config.batch_size, seed=self.config.seed, shard=shard)

    def open_evaluation(self, shard: Shard) -> BatchLoader:
        """Open the evaluation images only.

        Args:
            shard: Rank and number of ranks.

        Returns:
            The rank's batches.
        """
        return self.data.open_evaluation(batch_size=self.evaluation_batch, shard=shard)

    def terms(self, batch: Batch) -> Terms:
        """Count the images of a batch, which are its loss terms.

        Args:
            batch: Images and labels.

        Returns:
            The number of images.
        """
        return Terms(len(batch[1]))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the mean cross-entropy against smoothed labels.

        Args:
            model: The network.
            batch: Images and labels.

        Returns:
            The loss, and the logits (n, outputs).
        """
        images, labels = batch
        scores = model(images)
        return Loss(training_loss(scores, labels, self.config.label_smoothing, self.config.smoothing_form), scores)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the sum of the cross-entropy without smoothing, and count the correctly classified images.

        Args:
            model: The network.
            batch: Images and labels, at least one.

        Returns:
            `loss`, `top1` and `top5`. With fewer than five outputs, `top5` counts a label among all outputs.
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
        """Return the metrics of an evaluation.

        Returns:
            The loss and the accuracies; top-1 accuracy is the primary metric.
        """
        return self.METRICS
