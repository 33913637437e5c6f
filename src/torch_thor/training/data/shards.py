"""The images of each batch of each process, as pure functions of (seed, epoch, rank, world size).

Training: the shuffled images of an epoch are cut into batches, and each rank takes its part of each batch. The images
of a step therefore do not depend on the number of processes. Images that do not fill a batch at the end of an epoch
are left out; they are different ones in each epoch.

Evaluation: every image exactly once. In an `EvaluationOrder`, all ranks have the same number of batches, because a
wrapped model may communicate in every forward pass. The sizes of batches differ by at most one; with fewer images than
batches, some are empty.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torch_thor.training.errors import require


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the training images in one epoch.

    Args:
        count: Images in the training set.
        seed: The run's seed.
        epoch: Number of the epoch, from 0.

    Returns:
        A permutation of range(count), (count,), int64, on the CPU.
    """
    digest = hashlib.sha256(f"{seed},{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(count, generator=generator)


@dataclass(frozen=True)
class Shard:
    """The position of one process among those that share the data.

    Args:
        rank: Its rank, from 0.
        world_size: The number of processes.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        require(
            0 <= self.rank < self.world_size,
            f"rank={self.rank} must lie in [0, world_size={self.world_size})",
        )


class BatchOrder(Protocol):
    """The batches of one rank."""

    @property
    def batches(self) -> int:
        """Batches in an epoch, the same number on every rank."""
        ...

    @property
    def images(self) -> int:
        """Images in an epoch, on this rank."""
        ...

    @property
    def may_be_empty(self) -> bool:
        """Whether batches without images are allowed."""
        ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Return the batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start: Number of batches to skip.

        Returns:
            For each batch, the indices of its images.
        """
        ...


@dataclass(frozen=True)
class TrainingOrder:
    """Shuffled batches, all of the same size.

    Args:
        count: Images in the data set.
        batch_size: Images per batch, on all ranks together.
        seed: The run's seed.
        shard: Rank and number of ranks.

    Raises:
        UserError: If the batch size is not a multiple of the number of ranks, or larger than the data set.
    """

    count: int
    batch_size: int
    seed: int
    shard: Shard = Shard()

    may_be_empty = False

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size={self.batch_size} must be 1 or more")
        require(
            self.batch_size % self.shard.world_size == 0,
            f"batch_size={self.batch_size} cannot be shared evenly by {self.shard.world_size} processes: it is the "
            f"number of images per step on all of them together; choose a multiple of {self.shard.world_size}",
        )
        require(
            self.batches >= 1,
            f"batch_size={self.batch_size} is larger than the training set ({self.count} images): lower batch_size",
        )

    @property
    def batches(self) -> int:
        """Batches in an epoch."""
        return self.count // self.batch_size

    @property
    def images(self) -> int:
        """Images in an epoch, on this rank."""
        return self.batches * self._share

    @property
    def _share(self) -> int:
        return self.batch_size // self.shard.world_size

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Yield the batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start: Number of batches to skip.

        Yields:
            For each batch, the indices of its images.
        """
        order = epoch_order(self.count, self.seed, epoch)
        for batch in range(start, self.batches):
            first = batch * self.batch_size + self.shard.rank * self._share
            yield order[first : first + self._share].tolist()


@dataclass(frozen=True)
class WholeBatches:
    """Every image once, in the order of the data set, in the same batches as on a single process.

    Batches are assigned to the ranks in turn, so one rank may have one batch more than another. The network must not
    communicate in its forward pass. The result of a batch is bit for bit the same on every number of processes.

    Args:
        count: Images in the data set.
        batch_size: Largest number of images in a batch; sizes differ by at most one.
        shard: Rank and number of ranks.
    """

    count: int
    batch_size: int
    shard: Shard = Shard()

    may_be_empty = True

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size={self.batch_size} must be 1 or more")

    @property
    def batches(self) -> int:
        """Batches of this rank."""
        return len(self._own)

    @property
    def images(self) -> int:
        """Images of this rank."""
        return sum(len(batch) for batch in self.epoch(0))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Yield the batches of an epoch.

        Args:
            epoch: Not used.
            start: Number of batches to skip.

        Yields:
            For each batch, the indices of its images.
        """
        for batch in self._own[start:]:
            yield list(range(batch * self.count // self._all, (batch + 1) * self.count // self._all))

    @property
    def _all(self) -> int:
        return -(-self.count // self.batch_size)

    @property
    def _own(self) -> range:
        return range(self.shard.rank, self._all, self.shard.world_size)


@dataclass(frozen=True)
class EvaluationOrder:
    """Every image once, in the order of the data set, with the same number of batches on every rank.

    Args:
        count: Images in the data set.
        batch_size: Largest number of images in a batch of one rank.
        shard: Rank and number of ranks.
    """

    count: int
    batch_size: int
    shard: Shard = Shard()

    may_be_empty = True

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size={self.batch_size} must be 1 or more")

    @property
    def batches(self) -> int:
        """Batches in an epoch."""
        return -(-self.count // (self.batch_size * self.shard.world_size))

    @property
    def images(self) -> int:
        """Images in an epoch, on this rank."""
        return sum(len(part) for part in self._parts())

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Yield the batches of an epoch.

        Args:
            epoch: Not used.
            start: Number of batches to skip.

        Yields:
            For each batch, the indices of its images.
        """
        for part in self._parts(start):
            yield list(part)

    def _parts(self, start: int = 0) -> Iterator[range]:
        parts = self.batches * self.shard.world_size
        for batch in range(start, self.batches):
            part = batch * self.shard.world_size + self.shard.rank
            yield range(part * self.count // parts, (part + 1) * self.count // parts)
