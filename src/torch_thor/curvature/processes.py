"""The interface through which a refresh communicates with other processes, and its implementation for one process.

This package does not call torch.distributed. For training on several processes, :mod:`torch_thor.distributed`
implements the interface. An implementation decides which process inverts which block.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

# For each tensor of blocks ``(count, s, s)``, one index more than there are processes, from 0 to ``count``: process r
# owns the blocks from index r to index r + 1 of this list.
Bounds = Sequence[Sequence[int]]


class BlockExchange(Protocol):
    """Divides the inversion of blocks among the processes that refresh together."""

    def deal_out(self, parts: Sequence[Tensor], fixed: Sequence[Sequence[int] | None]) -> Bounds:
        """Return which process owns which blocks; only shapes are read, so the result is the same on all processes."""
        ...

    def sum_to_owners_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Replace symmetric blocks by their sum over all processes at their owner; all others become undefined."""
        ...

    def share_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Replace symmetric blocks by those of their owner, so that they are the same on all processes."""
        ...

    def share_with_replicas_(self, parts: Sequence[Tensor], replicas: object) -> None:
        """Replace symmetric blocks by those of the first process of a group, which holds the same rows of weights."""
        ...


class Processes(Protocol):
    """The processes that train one model, each on its own part of every batch."""

    @property
    def count(self) -> int:
        """The number of processes."""
        ...

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        ...

    @property
    def exchange(self) -> BlockExchange | None:
        """Divides inversions among the processes; None for one process."""
        ...

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, which passes as many as the others; integers are exact up to 2⁵³."""
        ...


class OneProcess:
    """A process that trains alone."""

    count = 1
    rank = 0
    exchange = None

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of this process."""
        return [list(numbers)]


ALONE = OneProcess()
