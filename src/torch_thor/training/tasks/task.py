"""The interface between the training loop and a task: its network, its data, its loss and its metrics.

A batch is a tree of tensors (tuples, lists, mappings), whose leaves have the samples in their first dimension. The loop
moves, splits and counts batches; only the task knows what they contain.

The loss of a step is a mean over N loss terms: images for a classifier, predicted characters for a language model. A
task gives means and not sums, because the mean is what a network is trained on, and dividing a sum afterwards would
round otherwise. Where a step is computed in parts, each part's mean counts as many times as it has terms.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from torch_thor.training.data.shards import Shard
from torch_thor.training.data.stream import BatchLoader, Streams
from torch_thor.training.errors import require

Batch = Any  # a tree of tensors


@dataclass(frozen=True)
class Terms:
    """The loss terms of a batch, known before its forward pass.

    THOR has to know them: N scales the gradients of layer outputs, and rows that are padding must not enter the
    statistics, which some layers gather in the forward pass already.

    Args:
        number: How many terms the loss is a mean over.
        row_mask: bool, of the leading dimensions of the layers' inputs: True for the rows that count; `None` is all.
    """

    number: int
    row_mask: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """The training loss of a batch, and what the network has predicted.

    Args:
        mean: The mean over the batch's terms, without dimensions, to be differentiated.
        output: What the network returned, not detached.
        distribution: Of the labels, given the output, as `THOR.sample_fisher` takes it.
        dim: The dimension of categorical logits that holds the classes; `None` is the second of two.
    """

    mean: Tensor
    output: Any
    distribution: str | Callable[[Any], Distribution] = "categorical"
    dim: int | None = None


@dataclass(frozen=True)
class Metric:
    """One figure that an evaluation gives.

    Args:
        name: In `metrics.jsonl`, `summary.json` and TensorBoard.
        title: In tables and at the axes of plots.
        word: In a printed line.
        higher_is_better: Its direction.
        primary: Whether it decides which checkpoint is best, and when a target is reached; exactly one of a task does.
        share: Whether it is a share in [0, 1], printed in per cent.
        derived: Computes it from the others' means, by name; `None`: it is a mean itself.
        over: What it is a mean over, by the name under which `measure` counts it; `None` is loss terms.
    """

    name: str
    title: str
    word: str
    higher_is_better: bool
    primary: bool = False
    share: bool = False
    derived: Callable[[Mapping[str, float]], float] | None = None
    over: str | None = None

    def text(self, value: float) -> str:
        """Write a value for people.

        Args:
            value: The value.

        Returns:
            Per cent with two digits after the point, or four digits.
        """
        return f"{value:.2%}" if self.share else f"{value:.4g}"

    def check_target(self, key: str, value: float, shown: object = None) -> None:
        """Refuse a target that the metric cannot reach.

        Args:
            key: The recipe's key.
            value: The target.
            shown: What the user wrote, where the target is one of several.
        """
        shown = value if shown is None else shown
        if self.share:
            rest = "it is a share, not per cent; null trains to the end"
            rule = f"must lie in (0, 1]: {'they are shares, not per cent' if key == 'targets' else rest}"
            require(0 < value <= 1, f"{key}={shown} {rule}")
        require(0 < value < math.inf, f"{key}={shown} must be above 0 and finite: it is a value of {self.word}")


def primary(metrics: Sequence[Metric]) -> Metric:
    """Find the primary metric.

    Args:
        metrics: A task's.

    Returns:
        The one that is primary.
    """
    (found,) = (metric for metric in metrics if metric.primary)
    return found


class EvaluationTask(Protocol):
    """What evaluating a network needs to know of its task."""

    @property
    def unit(self) -> str:
        """What a loss term is, in the plural: images, characters."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that batches are on, and that the network must be on."""
        ...

    def build_model(self) -> nn.Module:
        """Build the network with torch's global random numbers (seed them first).

        Returns:
            The network, on the CPU, in training mode.
        """
        ...

    def open_evaluation(self, shard: Shard) -> BatchLoader:
        """Open what the network is evaluated on, each sample once over all ranks, in the batches of one process.

        Args:
            shard: Which rank of how many.

        Returns:
            The rank's batches; one rank may have a batch more than another.
        """
        ...

    def terms(self, batch: Batch) -> Terms:
        """Count the loss terms of a batch.

        Args:
            batch: From a stream, or a part of one.

        Returns:
            Their number, and which rows count.
        """
        ...

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Measure what is a mean over terms, without gradients, in evaluation mode.

        Args:
            model: The network.
            batch: From an evaluation stream, with one loss term or more.

        Returns:
            For each metric that is not derived the sum over the batch's terms, without dimensions; and for each that is
            a mean over something else, how many of these the batch has.
        """
        ...

    def metrics(self) -> Sequence[Metric]:
        """Name what an evaluation gives.

        Returns:
            The metrics, exactly one of them primary; one of them is called `loss`.
        """
        ...


class Task(EvaluationTask, Protocol):
    """What training a network needs to know."""

    def open_data(self, shard: Shard) -> Streams:
        """Open the data from the beginning.

        Args:
            shard: Which rank of how many.

        Returns:
            Training batches and evaluation batches.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the network and compute its training loss.

        Args:
            model: The network, perhaps wrapped for several processes, or compiled.
            batch: From the training stream, or a part of one.

        Returns:
            The mean loss over `terms(batch)`, and what was predicted.
        """
        ...
