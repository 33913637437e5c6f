"""The interface between the training loop and the data: streams of batches, which are trees of tensors on the device.

A stream of training batches is endless, and has a position that is stored in checkpoints.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_thor.torch_internals import tree_leaves, tree_map
from torch_thor.training.data.shards import BatchOrder, Shard, TrainingOrder
from torch_thor.training.errors import UserError

Batch = Any  # a tree of tensors with the samples in their first dimension, such as (images, labels)


class BatchLoader(Protocol):
    """The batches of one rank."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        ...

    def __iter__(self) -> Iterator[Batch]: ...

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch.

        Args:
            epoch: The index of the epoch, counted from 0.
            start: Number of batches to skip.

        Returns:
            Trees of tensors, on the device.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, such as the record of unreadable samples.

        Returns:
            Plain values.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of another loader.

        Args:
            state: From `state_dict`.
        """
        ...


class StatelessLoader(ABC):
    """Batches of samples that can all be read, so that a checkpoint does not have to record unreadable ones.

    Args:
        order: The samples of each batch.
    """

    def __init__(self, order: BatchOrder) -> None:
        self.order = order

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.order.batches

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    @abstractmethod
    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch.

        Args:
            epoch: The index of the epoch, counted from 0.
            start: Number of batches to skip.

        Yields:
            Trees of tensors.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state.

        Returns:
            An empty mapping.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (not abstract: nothing is to be done)
        """Ignore the state: there is nothing to restore.

        Args:
            state: From `state_dict`.
        """


class MemoryLoader(StatelessLoader):
    """Batches of samples in memory.

    Args:
        tensors: A tree of tensors, each (N, ...), on the device to train on.
        order: The samples of each batch.
    """

    def __init__(self, tensors: Any, order: BatchOrder) -> None:
        super().__init__(order)
        self.tensors = tensors
        self._device = tree_leaves(tensors)[0].device

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch.

        Args:
            epoch: The index of the epoch, counted from 0.
            start: Number of batches to skip.

        Yields:
            Trees of the same structure as `tensors`, on their device.
        """
        for numbers in self.order.epoch(epoch, start):
            yield self.take(torch.tensor(numbers, dtype=torch.int64, device=self._device))

    def take(self, numbers: Tensor) -> Batch:
        """Return the samples of a batch.

        Args:
            numbers: Indices of the samples, (n,), int64.

        Returns:
            A tree of the same structure as `tensors`.
        """
        return tree_map(lambda tensor: tensor[numbers], self.tensors)


class TrainingBatches(Protocol):
    """Training batches for the training loop, with a position that a checkpoint can store."""

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        ...

    def __iter__(self) -> Iterator[Batch]: ...

    def endless(self) -> Iterator[Batch]:
        """Return all batches from the current position on, at least one for each remaining step of the training.

        Returns:
            Trees of tensors.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the properties of the data that it is valid for.

        Returns:
            Plain values.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of other training batches.

        Args:
            state: The result of `state_dict`, of any rank and any number of ranks.
        """
        ...


class TrainingStream:
    """Endless training batches, with a position that a checkpoint can store.

    One iteration yields the rest of the current epoch. A batch counts as consumed when it is yielded, no matter how
    many batches the loader has read ahead.

    Args:
        loader: The loader of the training batches.
        order: The order of the loader.
        epoch: The index of the first epoch, counted from 0.
    """

    def __init__(self, loader: BatchLoader, order: TrainingOrder, epoch: int = 0) -> None:
        self.loader, self.order = loader, order
        self.epoch = epoch
        self.batch = 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader.batches(self.epoch, self.batch):
            done = self.epoch * len(self) + self.batch + 1
            self.epoch, self.batch = divmod(done, len(self))
            yield batch

    def endless(self) -> Iterator[Batch]:
        """Yield all batches from the current position on, epoch after epoch.

        Yields:
            Trees of tensors.
        """
        while True:
            yield from self

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the data, batch size and seed that it belongs to.

        Returns:
            Plain values.
        """
        return {"epoch": self.epoch, "batch": self.batch, "loader": self.loader.state_dict(), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of another stream, with the same samples in the same batches with the same crops.

        Args:
            state: From `state_dict`, of any rank and any number of ranks: the samples of a batch do not depend on them.

        Raises:
            UserError: If the other stream had other data, another seed or another batch size.
        """
        for key, own in self._identity().items():
            if state[key] != own:
                raise UserError(
                    f"the checkpoint's data has {key}={state[key]}, this run {key}={own}: resume with the same data, "
                    "seed and batch size"
                )
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self.loader.load_state_dict(state["loader"])

    def _identity(self) -> dict[str, int]:
        return {"samples": self.order.count, "batch_size": self.order.batch_size, "seed": self.order.seed}


@dataclass(frozen=True)
class Streams:
    """The batches that one rank reads.

    Args:
        train: Training batches.
        evaluation: Evaluation batches. Each sample is in the batches of one rank only, and batches may be empty.
    """

    train: TrainingBatches
    evaluation: BatchLoader


class EvaluationSet(Protocol):
    """A data set on which a network can be evaluated; it need not have training samples."""

    @property
    def classes(self) -> int:
        """Number of classes."""
        ...

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape (C, H, W) of the images that the network receives."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that batches are on."""
        ...

    def open_evaluation(self, *, batch_size: int, shard: Shard) -> BatchLoader:
        """Open the images for an evaluation. Each image is in the batches of one rank only.

        Args:
            batch_size: Images per batch.
            shard: Rank and number of ranks.

        Returns:
            The batches of the rank. Ranks may differ by one in their number of batches.
        """
        ...


class DataSet(EvaluationSet, Protocol):
    """A data set with training and evaluation images, which can be opened again for each training run."""

    def open(self, *, batch_size: int, seed: int, shard: Shard) -> Streams:
        """Open the data set at the start of a training run.

        Args:
            batch_size: Images per step, on all ranks together.
            seed: The seed that determines, together with the index of the epoch, the order and the crops.
            shard: Rank and number of ranks.

        Returns:
            Training batches and evaluation batches.
        """
        ...
