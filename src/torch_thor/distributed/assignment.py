"""Which process inverts which block, or orthogonalises which matrix: the most expensive first.

Longest processing time first (Graham 1969): each block goes to the process with the least work so
far. Only the number of blocks that a process gets of each tensor matters, because blocks of one
tensor cost the same. So the blocks of a process are neighbours, and are sent as one slice.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache

from torch_thor.curvature.communication import Bounds

Shape = tuple[int, int]  # the number of blocks of a tensor, and s


def cost(size: int) -> int:
    """Return the cost of a block, in the time of one multiply-add in a large inversion."""
    # The factorisation and the inverse take n³ multiplications. All operations that read or write
    # each element a few times (damping, averaging, packing) take the time of 64 n². A formula, and
    # not times that are measured in the training, because with other owners sums have other last
    # bits, and a training would not be repeatable.
    return size**3 + 64 * size**2


@lru_cache(maxsize=64)
def assign(
    parts: tuple[Shape, ...],
    processes: int,
    fixed: tuple[tuple[int, ...] | None, ...] = (),
    cost: Callable[[int], int] = cost,
) -> Bounds:
    """Deal out blocks to processes; ``fixed`` are the bounds of blocks that have owners already."""
    bounds: list[Sequence[int]] = [
        of_part or () for _, of_part in itertools.zip_longest(parts, fixed)
    ]
    loads = _totals(parts, bounds, processes, cost)
    # of processes with equal work the lowest rank is first
    work = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(work)
    for i in sorted(
        (i for i, of_part in enumerate(bounds) if not of_part), key=lambda i: -parts[i][1]
    ):
        count, size = parts[i]
        # of a diagonal, which may have 30,000 blocks, as many for each process while there are
        # plenty: this saves time
        every = max(0, count // processes - 1) if size == 1 else 0
        of_ranks = [every] * processes
        # equal for all, so it remains a heap
        work = [(load + every * cost(size), rank) for load, rank in work]
        for _ in range(count - every * processes):
            load, rank = work[0]
            of_ranks[rank] += 1
            heapq.heapreplace(work, (load + cost(size), rank))
        bounds[i] = tuple(itertools.accumulate(of_ranks, initial=0))
    return tuple(bounds)


@lru_cache(maxsize=64)
def assign_matrices(costs: tuple[int, ...], processes: int) -> tuple[tuple[int, ...], ...]:
    """Return the matrices of each process, dealt out by their cost."""
    bounds = assign(tuple((1, cost) for cost in costs), processes, cost=int)
    return tuple(
        tuple(i for i, of_part in enumerate(bounds) if of_part[rank] < of_part[rank + 1])
        for rank in range(processes)
    )


def imbalance(
    parts: Sequence[Shape], processes: int, fixed: Sequence[tuple[int, ...] | None] = ()
) -> float:
    """Return how much longer than the mean the process with most work takes."""
    loads = _totals(parts, assign(tuple(parts), processes, tuple(fixed)), processes, cost)
    return max(loads) * processes / sum(loads) if sum(loads) else 1.0


def _totals(
    parts: Sequence[Shape], bounds: Bounds, processes: int, of_block: Callable[[int], int]
) -> list[int]:
    totals = [0] * processes
    for (_, size), of_part in zip(parts, bounds, strict=True):
        for rank, (first, last) in enumerate(itertools.pairwise(of_part)):
            totals[rank] += (last - first) * of_block(size)
    return totals


def packed_size(size: int) -> int:
    """Return the number of elements of the lower triangle of a block."""
    return size * (size + 1) // 2


def packed_sizes(parts: Sequence[Shape], bounds: Bounds) -> list[int]:
    """Return how many elements of lower triangles each process owns."""
    return _totals(parts, bounds, len(bounds[0]) - 1, packed_size)


def pads(sizes: Sequence[int]) -> bool:
    """Return whether pieces of these sizes are padded to the largest.

    They are then sent by reduce-scatter and all-gather.
    """
    # With few large blocks (factors that are not split, or many processes) the padding would be
    # larger than the blocks. Then an all-reduce of all pieces, which sends everything twice, sends
    # less. The pieces of a single owner need no padding.
    has_owners = sum(size > 0 for size in sizes) > 1
    return has_owners and len(sizes) * max(sizes) <= 2 * sum(sizes)
