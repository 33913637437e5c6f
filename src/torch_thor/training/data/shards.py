"""Which images each batch of each process holds: pure functions of (seed, epoch, rank, world size).

Training: the epoch's order is cut into batches, and each rank takes its part of each. So the images of a step do not
depend on how many processes share it. What is left over at the end of an epoch is less than one batch and is left out,
other images in each epoch.

Evaluation: every image exactly once. All ranks have the same number of batches (a wrapped model may communicate in
every forward), of sizes that differ by one at most; with fewer images than batches some are empty.
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
    """One of the processes that share the work.

    Args:
        rank: Its number, from 0.
        world_size: How many there are.
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
        """Whether a batch without images is in order."""
        ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Return the batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start: Batches to pass over.

        Returns:
            For each batch the numbers of its images.
        """
        ...


@dataclass(frozen=True)
class TrainingOrder:
    """Shuffled batches, all full.

    Args:
        count: Images in the set.
        batch_size: Images in a batch, of all ranks together.
        seed: The run's seed.
        shard: Which rank.
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
            "images of a step on all of them together; choose a multiple",
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
            start: Batches to pass over.

        Yields:
            For each batch the numbers of its images.
        """
        order = epoch_order(self.count, self.seed, epoch)
        for batch in range(start, self.batches):
            first = batch * self.batch_size + self.shard.rank * self._share
            yield order[first : first + self._share].tolist()


@dataclass(frozen=True)
class WholeBatches:
    """Every image once, in the set's own order, in the batches that one process would have.

    The ranks take turns, so one may have a batch more than another: for networks that do not communicate in forward.
    What a batch gives is then the same, bit for bit, whoever computes it.

    Args:
        count: Images in the set.
        batch_size: Most images in a batch; sizes differ by one at most.
        shard: Which rank.
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
            epoch: Makes no difference.
            start: Batches to pass over.

        Yields:
            For each batch the numbers of its images.
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
    """Every image once, in the set's own order.

    Args:
        count: Images in the set.
        batch_size: Most images in a batch of one rank.
        shard: Which rank.
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
            epoch: Makes no difference.
            start: Batches to pass over.

        Yields:
            For each batch the numbers of its images.
        """
        for part in self._parts(start):
            yield list(part)

    def _parts(self, start: int = 0) -> Iterator[range]:
        parts = self.batches * self.shard.world_size
        for batch in range(start, self.batches):
            part = batch * self.shard.world_size + self.shard.rank
            yield range(part * self.count // parts, (part + 1) * self.count // parts)
