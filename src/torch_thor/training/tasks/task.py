"""The interface between the training loop and a task: its network, its data, its loss and its metrics.

A batch is a tree of tensors (tuples, lists, mappings), whose leaves have the samples in their first dimension. The loop
moves, splits and counts batches; only the task knows what they contain.

The loss of a step is a mean over N loss terms: images for a classifier, predicted characters for a language model. A
task returns the mean and not the sum, because dividing a sum afterwards would be rounded differently. If a step is
computed in micro-batches, their means are weighted by their numbers of loss terms.
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
    """The loss terms of a batch, which are known before its forward pass.

    THOR needs them: it scales the gradients of layer outputs by N, and excludes rows that are padding from the
    statistics, which some layers gather in the forward pass.

    Args:
        number: N, the number of terms that the loss averages over.
        row_mask: bool, with the leading dimensions of the layers' inputs; True for rows that enter the statistics.
            `None` stands for all rows.
    """

    number: int
    row_mask: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """The training loss of a batch, and the predictions of the network.

    Args:
        mean: The mean over the loss terms of the batch, a tensor without dimensions, which can be differentiated.
        output: The output of the network, not detached.
        distribution: The distribution of the labels given the output, as for `THOR.sample_fisher`.
        dim: The class dimension of categorical logits; `None` stands for the last of two dimensions.
    """

    mean: Tensor
    output: Any
    distribution: str | Callable[[Any], Distribution] = "categorical"
    dim: int | None = None


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluation.

    Args:
        name: The name in `metrics.jsonl`, `summary.json` and TensorBoard.
        title: The name in tables and plots.
        word: The name in a printed line.
        higher_is_better: Whether larger values are better.
        primary: Whether it decides which checkpoint is best and when a target is reached. Each task has exactly one
            primary metric.
        share: Whether it is a fraction in [0, 1], which is printed in per cent.
        derived: Computes the metric from the means of the others, by name; `None` if the metric is a mean itself.
        over: The name under which `measure` returns the number of items that the mean is over; `None` stands for loss
            terms.
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
        """Format a value for printing.

        Args:
            value: The value.

        Returns:
            Per cent with two decimals for a fraction, and four significant digits otherwise.
        """
        return f"{value:.2%}" if self.share else f"{value:.4g}"

    def check_target(self, key: str, value: float, shown: object = None) -> None:
        """Refuse a target that the metric cannot reach.

        Args:
            key: The recipe's key.
            value: The target.
            shown: The value in the error message, if the target is one of several; `None` stands for `value`.

        Raises:
            UserError: If the target is out of range.
        """
        shown = value if shown is None else shown
        if self.share:
            rest = "it is a fraction, not per cent; null trains to the end"
            rule = f"must lie in (0, 1]: {'they are fractions, not per cent' if key == 'targets' else rest}"
            require(0 < value <= 1, f"{key}={shown} {rule}")
        require(0 < value < math.inf, f"{key}={shown} must be above 0 and finite: it is a value of {self.word}")


def primary(metrics: Sequence[Metric]) -> Metric:
    """Return the primary metric.

    Args:
        metrics: The metrics of a task.

    Returns:
        The one that is primary.
    """
    (found,) = (metric for metric in metrics if metric.primary)
    return found


class EvaluationTask(Protocol):
    """The part of a task that evaluating a network needs."""

    @property
    def unit(self) -> str:
        """The name of a loss term in the plural, such as images or characters."""
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
        """Open the evaluation data: each sample once over all ranks, in the batches of a single process.

        Args:
            shard: Rank and number of ranks.

        Returns:
            The rank's batches; one rank may have one batch more than another.
        """
        ...

    def terms(self, batch: Batch) -> Terms:
        """Count the loss terms of a batch.

        Args:
            batch: A batch, or a micro-batch of one.

        Returns:
            Their number, and the mask of the rows that enter THOR's statistics.
        """
        ...

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the sums of the metrics over a batch. It is called without gradients and in evaluation mode.

        Args:
            model: The network.
            batch: An evaluation batch with at least one loss term.

        Returns:
            For each metric that is not derived, the sum over the batch, a tensor without dimensions. If a metric is a
            mean over other items than loss terms, also their number, under the name `Metric.over`.
        """
        ...

    def metrics(self) -> Sequence[Metric]:
        """Return the metrics of an evaluation.

        Returns:
            The metrics. Exactly one is primary, and one has the name `loss`.
        """
        ...


class Task(EvaluationTask, Protocol):
    """A task as training a network needs it."""

    def open_data(self, shard: Shard) -> Streams:
        """Open the data at the beginning of a training.

        Args:
            shard: Rank and number of ranks.

        Returns:
            Training batches and evaluation batches.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the network and compute its training loss.

        Args:
            model: The network; it may be compiled or wrapped by `DistributedDataParallel`.
            batch: A training batch, or a micro-batch of one.

        Returns:
            The mean loss over the loss terms of the batch, and the output of the network.
        """
        ...
