"""The interface by which a refresh communicates with other processes.

A single process has the same interface.

This package does not call torch.distributed. For training on several processes,
:mod:`torch_thor.distributed` implements the interface. An implementation decides which process
inverts which block.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

# For each tensor of blocks ``(count, s, s)``, one index more than there are processes, from 0 to
# ``count``: process r owns the blocks from index r to index r + 1 of this list.
Bounds = Sequence[Sequence[int]]

# Where the rows of weights are divided: all processes, those that hold one copy of the weights
# together, or those that hold the same rows.
Among = Literal["all", "shards", "replicas"]


class Processes:
    """The processes that train one model, each on its own part of every batch.

    These methods serve a single process.
    """

    count, rank = 1, 0

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, which passes as many as the others.

        Integers are exact up to 2⁵³.
        """
        return [list(numbers)]

    def assign(self, parts: Sequence[Tensor], fixed: Sequence[Sequence[int] | None]) -> Bounds:
        """Return which process owns which blocks.

        Only shapes are read, so the result is the same on all processes.
        """
        return [(0, len(part)) for part in parts]

    def sum_to_owners_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Replace symmetric blocks by their sum over all processes at their owner.

        All others become undefined.
        """

    def share_(self, parts: Sequence[Tensor], bounds: Bounds, among: Among = "all") -> None:
        """Replace symmetric blocks by their owner's, so that all processes have the same blocks."""

    def all_reduce(self, tensor: Tensor, among: Among = "all") -> Tensor:
        """Return the sum of a tensor over processes."""
        return tensor

    def all_to_all(
        self, tensor: Tensor, sent: list[int], received: list[int], among: Among = "all"
    ) -> Tensor:
        """Exchange elements of a vector, of which each process gets as many as ``sent`` says."""
        return tensor


SINGLE_PROCESS = Processes()
