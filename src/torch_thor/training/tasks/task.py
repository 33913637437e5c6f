"""What a training loop needs of a task: its network, its data, its loss and its metrics.

A batch is a tree of tensors (tuples, lists, mappings) whose leaves have the samples in their first
dimension. The loop moves, splits and counts batches; only the task knows what they contain. The
loss of a step is a mean over N loss terms: images for a classifier, predicted characters for a
language model. A task returns the mean, because dividing a sum afterwards would be rounded
differently; the means of micro-batches and of processes are weighted by their terms.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Recipe

Batch = Any  # a tree of tensors


@dataclass(frozen=True)
class Terms:
    """The loss terms of a batch, which are known before its forward pass.

    Args:
        number: N, the number of terms that the loss averages over.
        row_mask: bool, with the leading dimensions of the layers' inputs; True for rows that enter
            THOR's statistics. None stands for all rows.
    """

    number: int
    row_mask: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """The training loss of a batch, and the predictions of the network.

    Args:
        mean: The mean over the loss terms of the batch, a tensor without dimensions, which can be
            differentiated; 0 where a part of a batch has no term.
        output: The output of the network, not detached.
        distribution: The distribution of the labels given the output, as for `THOR.sample_fisher`.
    """

    mean: Tensor
    output: Any
    distribution: str | Callable[[Any], Distribution] = "categorical"


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluation.

    Args:
        name: The name in `metrics.jsonl`, `summary.json` and TensorBoard.
        title: The name in tables and plots.
        word: The name in a printed line.
        higher_is_better: Whether larger values are better.
        primary: Whether it decides which checkpoint is best and when a target is reached; one
            metric of a task is.
        share: Whether it is a fraction in [0, 1], which is printed in per cent.
        derived: Computes the metric from the means of the others, by name; None if it is a mean
            itself.
        over: The name under which `measure` returns the number of items that the mean is over; None
            for loss terms.
    """

    name: str
    title: str
    word: str
    higher_is_better: bool
    primary: bool = False
    share: bool = False
    derived: Callable[[Mapping[str, float]], float] | None = None
    over: str | None = None

    def text(self, value: float | None) -> str:
        """Format a value: fractions in per cent with two decimals, else four significant digits."""
        if value is None:
            return "not finite"
        return f"{value:.2%}" if self.share else f"{value:.4g}"

    def better(self, value: float, than: float) -> bool:
        """Return whether a value is better than another; NaN is worse than everything."""
        is_better = value > than if self.higher_is_better else value < than
        return is_better or (than != than and value == value)


class Task(Protocol):
    """A task; `torch_thor.training.tasks` lists all of them.

    A method `sample(net)` of a task returns a line that a trained network writes.

    Args:
        recipe: The recipe.
        device: The device of the batches.
        say: Prints a line.
        train: False for an evaluation, which needs no training data.
        data: For an evaluation, the `data` of the training.
    """

    unit: str  # the name of a loss term in the plural, such as images or characters
    metrics: Sequence[Metric]  # one has the name "loss"
    steps_per_epoch: int
    data: dict[str, Any]  # what identifies the training data; a run continues with the same only

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        say: Callable[[str], None],
        *,
        train: bool,
        data: Mapping[str, Any] | None = None,
    ) -> None: ...

    def model(self) -> nn.Module:
        """Build the network on the CPU, in training mode, with torch's global random numbers."""

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Return the training batches of a process, on its device, without end.

        Args:
            ranks: The process among those that share each batch.
            start: The number of steps already taken. Batches are functions of the seed and their
                number.
        """

    def held_out(self, ranks: Ranks) -> Iterable[tuple[Batch, bool]]:
        """Return the evaluation batches of a process, and whether each counts.

        All processes have equally many, because the forward passes of a divided network
        communicate; a process with fewer than another repeats a batch, which does not count.
        """

    def terms(self, batch: Batch) -> Terms:
        """Count the loss terms of a batch, or of a micro-batch."""

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Run the network, perhaps compiled or wrapped, on a batch; compute its training loss."""

    def measure(self, net: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the sums of all metrics that are not derived over an evaluation batch, by name.

        If a metric is a mean over other items than loss terms, also their number, under the name
        `Metric.over`.
        """


def primary(metrics: Sequence[Metric]) -> Metric:
    """Return the metric that decides which evaluation is better."""
    return next(metric for metric in metrics if metric.primary)
