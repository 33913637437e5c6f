"""Factors of a weight whose rows are divided among processes (FSDP2), and the blocks of these factors.

One factor belongs to the rows of the weight: G, or A if the weight has the inputs first. It is split at the boundaries
of the shards as well, so every process holds the inverse blocks of its own rows, and preconditions them without those
of another process. The other factor is the same on all processes.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from torch_thor.curvature.block_layout import BlockLayout
from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.kinds.base import Kind


@dataclass(frozen=True)
class RowShards:
    """How the rows of a parameter are divided among the processes that train together."""

    count: int  # the number of shards
    bounds: tuple[int, ...]  # one index more than there are processes
    own: slice = field(compare=False)  # the rows that this process holds
    source: int = field(compare=False)  # the process that inverts the blocks of these rows
    total: Callable[[Tensor | None], Tensor] = field(repr=False, compare=False)
    exchange: Callable[[Tensor, list[int], list[int]], Tensor] = field(repr=False, compare=False)
    wrap: Callable[[Tensor], Tensor] = field(repr=False, compare=False)
    replicas: object = field(default=None, repr=False, compare=False)

    def bounds_of(self, rows: slice | None) -> tuple[int, ...]:
        """Return the bounds of some rows, counted from the first of them."""
        return bounds_within(self.bounds, rows)

    def own_of(self, rows: slice | None) -> slice:
        """Return those of some rows that this process holds, counted from the first row that it holds."""
        first, last = self.own.start, self.own.stop
        if rows is not None:
            first, last = max(first, rows.start), min(last, rows.stop)
        return slice(first - self.own.start, last - self.own.start) if first < last else slice(0, 0)


def bounds_within(bounds: tuple[int, ...], rows: slice | None) -> tuple[int, ...]:
    """Return how some rows are divided, counted from the first of them."""
    if rows is None:
        return bounds
    return tuple(min(max(bound, rows.start), rows.stop) - rows.start for bound in bounds)


def side_of_rows(kind: Kind) -> str:
    """Return which factor belongs to the rows of the weight."""
    return "A" if kind.transposed else "G"


def why_not_by_rows(kind: Kind, shape: tuple[int, ...]) -> str | None:
    """Return the reason why a layer cannot be preconditioned if the rows of its weight are divided."""
    if kind.routed or kind.groups > 1:
        return f"the weight is divided among processes, and has {kind.groups} groups with factors of their own"
    columns, of_two = math.prod(shape[1:]), copy.copy(kind)
    rows = torch.arange(2 * columns).view(2, *shape[1:])  # one row can be the same in another order of dimensions
    matrix = rows
    with contextlib.suppress(RuntimeError, AttributeError):  # it cannot be reshaped, or has a size that is computed
        setattr(of_two, "inputs" if kind.transposed else "outputs", 2)
        matrix = of_two.to_matrix(rows)
    if tuple(matrix.shape) == (1, 2, columns) and torch.equal(matrix.flatten(), rows.flatten()):
        return None
    return "the weight is divided among processes by its first dimension, which is no dimension of its matrix"


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    to_local = None if type(tensor) is Tensor else getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    found: Tensor = to_local()
    return found


@dataclass(frozen=True)
class ShardedLayout:
    """The layout of a factor whose rows are divided: the rows of every process are split on their own."""

    bounds: tuple[int, ...]  # process r owns the rows from index r to index r + 1 of this list
    split_dim: int | None  # the largest number of rows of a block; None for one block per process
    own: int = field(repr=False)  # the number of rows that this process holds
    source: int = field(repr=False)  # the process that inverts the blocks of these rows

    groups = 1

    @property
    def size(self) -> int:
        """The number of rows of the factor."""
        return self.bounds[-1]

    @cached_property
    def block(self) -> int:
        """The number of rows of the largest block."""
        return max(layout.block for layout, _ in self.runs)

    @cached_property
    def runs(self) -> list[tuple[BlockLayout, tuple[int, ...]]]:
        """Layouts of neighbouring rows: neighbouring shards of equal size are the groups of one layout."""
        if self.split_dim == 1:
            return [(BlockLayout(1, self.size, 1), self.bounds)]
        alike: list[tuple[int, list[int]]] = []  # the size of neighbouring shards, and the processes that hold them
        for process, (first, last) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if alike and alike[-1][0] == last - first:
                alike[-1][1].append(process)
            elif first < last:
                alike.append((last - first, [process]))
        found = []
        for size, processes in alike:
            counts = tuple(sum(p < i for p in processes) for i in range(len(self.bounds)))
            found.append((BlockLayout.of(len(processes), size, self.split_dim), counts))
        return found

    @cached_property
    def parts(self) -> list[tuple[tuple[int, int, int], tuple[int, ...]]]:
        """The shapes of the tensors of blocks, and the owners of their blocks."""
        found = []
        for layout, counts in self.runs:
            for shape in layout.shapes:
                if shape is not None:
                    of_one = shape[0] // layout.groups if self.split_dim != 1 else 1  # blocks for each that is counted
                    found.append((shape, tuple(count * of_one for count in counts)))
        return found

    @cached_property
    def owners(self) -> list[int]:
        """The processes that invert blocks of the factor; at least the first one."""
        pairs = enumerate(zip(self.bounds, self.bounds[1:], strict=False))
        return [process for process, (first, last) in pairs if first < last or not process]

    @cached_property
    def local(self) -> BlockLayout:
        """The layout of the rows that this process holds."""
        return BlockLayout.of(1, self.own, self.split_dim) if self.own else BlockLayout(1, 0, 1)


Layout = BlockLayout | ShardedLayout


class ShardedBlocks:
    """A factor with a :class:`ShardedLayout`, or the sums of one process for it: the blocks of all processes."""

    def __init__(self, layout: ShardedLayout, runs: list[BlockDiagonal]) -> None:
        self.layout = layout
        self.runs = runs

    @classmethod
    def zeros(cls, layout: ShardedLayout, *, dtype: torch.dtype, device: torch.device) -> "ShardedBlocks":
        """Return zero blocks."""
        return cls(layout, [BlockDiagonal.zeros(run, dtype=dtype, device=device) for run, _ in layout.runs])

    @property
    def blocks(self) -> Tensor:
        """The full blocks of the first run; of a diagonal factor all elements."""
        return self.runs[0].blocks

    def parts(self) -> list[Tensor]:
        """Return the stored tensors, each a batch of square blocks."""
        return [part for run in self.runs for part in run.parts()]

    def with_parts(self, parts: list[Tensor]) -> "ShardedBlocks":
        """Return blocks of the same layout with other tensors."""
        rest = iter(parts)
        return ShardedBlocks(self.layout, [run.with_parts([next(rest) for _ in run.parts()]) for run in self.runs])

    def bounds(self) -> list[tuple[int, ...]]:
        """Return which process owns which blocks of each part."""
        return [bounds for _, bounds in self.layout.parts]

    def add_second_moment_(self, samples: Tensor) -> None:
        """Add ``Σ x xᵀ`` over the columns of ``samples``, block by block."""
        first = 0
        for run in self.runs:
            groups, size = run.layout.groups, run.layout.size
            own = samples[0, first : first + groups * size]
            run.add_second_moment_(own.unflatten(0, (groups, size)))
            first += groups * size

    def group_traces(self) -> Tensor:
        """Return the trace of the factor."""
        return torch.stack([run.group_traces().sum() for run in self.runs]).sum()[None]

    def cut(self, split_dim: int | None) -> "ShardedBlocks":
        """Refuse to split the blocks further."""
        raise ValueError(f"split_dim={split_dim}: the blocks of sharded parameters cannot be cut again")

    def spread(self, own: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the part of a factor that this process holds, in the order of :meth:`parts`."""
        found: list[Tensor | None] = []
        for run, (_, counts) in zip(self.runs, self.layout.runs, strict=True):
            holds = counts[self.layout.source] < counts[self.layout.source + 1] and self.layout.own > 0
            found += own if holds else [None] * len(run.parts())
        return found

    def of_owner(self, parts: Sequence[Tensor]) -> BlockDiagonal:
        """Return the factor of the rows of this process."""
        layout, rest = self.layout.local, iter(parts)
        for run in self.runs:
            own = [next(rest) for _ in run.parts()]
            if len(own[0]):
                return BlockDiagonal(layout, own[0], own[1] if layout.tail else None)
        return BlockDiagonal.zeros(layout, dtype=self.blocks.dtype, device=self.blocks.device)  # of no rows
