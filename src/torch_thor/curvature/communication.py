"""The interface by which a refresh communicates with other processes.

It is also that of one process alone.

This package does not call torch.distributed. For training on several processes,
:mod:`torch_thor.distributed` implements the interface. An implementation decides which process
inverts which block.
"""

from collections.abc import Sequence

from torch import Tensor

# For each tensor of blocks ``(count, s, s)``, one index more than there are processes, from 0 to
# ``count``: process r owns the blocks from index r to index r + 1 of this list.
Bounds = Sequence[Sequence[int]]


class Processes:
    """The processes that train one model, each on its own part of every batch.

    These methods are those of one process alone.
    """

    count, rank = 1, 0

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, which passes as many as the others.

        Integers are exact up to 2⁵³.
        """
        return [list(numbers)]

    def deal_out(self, parts: Sequence[Tensor], fixed: Sequence[Sequence[int] | None]) -> Bounds:
        """Return which process owns which blocks.

        Only shapes are read, so the result is the same on all processes.
        """
        return [(0, len(part)) for part in parts]

    def sum_to_owners_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Replace symmetric blocks by their sum over all processes at their owner.

        All others become undefined.
        """

    def share_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Replace symmetric blocks by their owner's, so that all processes have the same ones."""

    def share_with_replicas_(self, parts: Sequence[Tensor], replicas: object) -> None:
        """Replace symmetric blocks by those of the first process of a group.

        The processes of the group hold the same rows of weights.
        """


ALONE = Processes()
