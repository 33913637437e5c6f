"""How processes divide the rows of a weight (FSDP2), and who inverts and keeps a factor's blocks.

One factor belongs to the rows of the weight: G, or A if the weight has the inputs first. Its blocks
end at the boundaries of the shards too, so every process holds the inverse blocks of its own rows,
and preconditions them without those of another process. The other factor is the same on all
processes, unless curvature is divided (``divide_curvature``): then only the owner of a block, which
inverts it, keeps it and its inverse.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from torch_thor.curvature.blocks import Cut
from torch_thor.curvature.communication import ALONE, Processes
from torch_thor.curvature.kinds.base import Kind


@dataclass(frozen=True)
class RowShards:
    """How the rows of a parameter are divided among the processes that train together."""

    count: int  # the number of shards
    bounds: tuple[int, ...]  # process r owns the rows from bounds[r] to bounds[r + 1]
    own: slice = field(compare=False)  # the rows that this process holds
    source: int = field(compare=False)  # the process that inverts the blocks of these rows
    # sums a tensor over the shards, exchanges rows (all-to-all), and makes a DTensor of the own
    # rows
    total: Callable[[Tensor | None], Tensor] = field(repr=False, compare=False)
    exchange: Callable[[Tensor, list[int], list[int]], Tensor] = field(repr=False, compare=False)
    wrap: Callable[[Tensor], Tensor] = field(repr=False, compare=False)
    # the group of those that hold the same rows
    replicas: object = field(default=None, repr=False, compare=False)

    def own_of(self, rows: slice | None) -> slice:
        """Return those of some rows that this process holds, counted from its first row."""
        first, last = self.own.start, self.own.stop
        if rows is not None:
            first, last = max(first, rows.start), min(last, rows.stop)
        return slice(first - self.own.start, last - self.own.start) if first < last else slice(0, 0)


def bounds_within(bounds: tuple[int, ...], rows: slice | None) -> tuple[int, ...]:
    """Return how some rows are divided, counted from the first of them."""
    if rows is None:
        return bounds
    return tuple(min(max(bound, rows.start), rows.stop) - rows.start for bound in bounds)


def shard_bounds(rows: int, shards: int) -> tuple[int, ...]:
    """Return the first row of each shard, and the number of rows.

    ``torch.chunk`` and FSDP2 divide them in this way.
    """
    each = -(-rows // shards)
    return tuple(min(i * each, rows) for i in range(shards + 1))


@dataclass(frozen=True)
class Owners:
    """Which process inverts which blocks of a factor, where each keeps a part of them alone."""

    # of run i, process r owns the blocks from bounds[i][r] to bounds[i][r + 1]
    bounds: tuple[tuple[int, ...], ...]
    # the owner of the blocks that this process keeps: itself, or a process that holds the same rows
    source: int
    replicas: object = field(default=None, compare=False)
    processes: Processes = field(default=ALONE, repr=False, compare=False)  # with the others

    @classmethod
    def of_shards(cls, cut: Cut, shards: RowShards, rows: slice | None) -> "Owners":
        """Return the owners of a factor whose rows are divided like those of the weight."""
        starts, found = bounds_within(shards.bounds, rows), []
        for run in cut.runs:
            found.append(
                tuple(min(max(start - run.first, 0) // run.size, run.count) for start in starts)
            )
        return cls(tuple(found), shards.source, shards.replicas)

    def held(self, run: int) -> slice:
        """Return the blocks of a run that this process keeps."""
        return slice(self.bounds[run][self.source], self.bounds[run][self.source + 1])


def why_not_by_rows(kind: Kind, shape: tuple[int, ...]) -> str | None:
    """Return why a layer cannot be preconditioned if the rows of its weight are divided."""
    if kind.routed or kind.groups > 1:
        return (
            f"the weight is divided among processes, and has {kind.groups} groups with factors of "
            "their own"
        )
    if kind.geometry.is_by_rows(shape):
        return None
    return (
        "the weight is divided among processes by its first dimension, which is no dimension of "
        "its matrix"
    )
