"""Which process inverts which block: blocks are dealt out by their cost, the most expensive first.

Longest processing time first (Graham 1969): each block goes to the process with the least work so far. Only the number
of blocks that a process gets of each tensor matters, because blocks of one tensor cost the same. So the blocks of a
process are neighbours, and are sent as one slice.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache

from torch_thor.curvature.processes import Bounds
from torch_thor.distributed.triangles import packed_size

Shape = tuple[int, int]  # the number of blocks of a tensor, and s


def cost(size: int) -> int:
    """Return the cost of a block, in the time unit of one multiplication and addition in a large inversion."""
    # The factorisation and the inverse take n³ multiplications. All operations that read or write each element a few
    # times (damping, averaging, packing) take the time of 64 n². A formula, and not times that are measured in the
    # training, because with other owners sums have other last bits, and a training would not be repeatable.
    return size**3 + 64 * size**2


@lru_cache(maxsize=64)
def deal_out(
    parts: tuple[Shape, ...], processes: int, fixed: tuple[tuple[int, ...] | None, ...] | None = None
) -> Bounds:
    """Deal out blocks to processes."""
    bounds: list[Sequence[int]] = [()] * len(parts)
    loads = [0] * processes
    for i, known in enumerate(fixed or ()):
        if known is not None:
            bounds[i] = known
            for rank in range(processes):
                loads[rank] += (known[rank + 1] - known[rank]) * cost(parts[i][1])
    work = [(load, rank) for rank, load in enumerate(loads)]  # of processes with equal work the lowest rank is first
    heapq.heapify(work)
    for i in sorted(range(len(parts)), key=lambda i: -parts[i][1]):
        count, size = parts[i]
        if fixed is not None and fixed[i] is not None:
            continue
        # of a diagonal, which may have 30,000 blocks, as many for each process while there are plenty: this saves time
        every = max(0, count // processes - 1) if size == 1 else 0
        of_ranks = [every] * processes
        work = [(load + every * cost(size), rank) for load, rank in work]  # equal for all, so it remains a heap
        for _ in range(count - every * processes):
            load, rank = heapq.heappop(work)
            of_ranks[rank] += 1
            heapq.heappush(work, (load + cost(size), rank))
        bounds[i] = (0, *_cumulative(of_ranks))
    return tuple(bounds)


def imbalance(parts: Sequence[Shape], processes: int, fixed: Sequence[tuple[int, ...] | None] | None = None) -> float:
    """Return how much longer than the mean the process with most work takes."""
    bounds = deal_out(tuple(parts), processes, None if fixed is None else tuple(fixed))
    loads = [0] * processes
    for (_, size), of_ranks in zip(parts, bounds, strict=True):
        for rank in range(processes):
            loads[rank] += (of_ranks[rank + 1] - of_ranks[rank]) * cost(size)
    return max(loads) * processes / sum(loads) if sum(loads) else 1.0


def packed_sizes(parts: Sequence[Shape], bounds: Bounds) -> list[int]:
    """Return how much each process owns."""
    of_ranks = [0] * (len(bounds[0]) - 1)
    for (_, size), starts in zip(parts, bounds, strict=True):
        for rank in range(len(of_ranks)):
            of_ranks[rank] += (starts[rank + 1] - starts[rank]) * packed_size(size)
    return of_ranks


def pads(sizes: Sequence[int]) -> bool:
    """Return whether pieces of these sizes are padded to the largest, to be sent by reduce-scatter and all-gather."""
    # With few large blocks (factors that are not split, or many processes) the padding would be larger than the blocks.
    # Then an all-reduce of all pieces, which sends everything twice, sends less.
    return len(sizes) * max(sizes) <= 2 * sum(sizes)


def _cumulative(numbers: Sequence[int]) -> list[int]:
    total, found = 0, []
    for number in numbers:
        total += number
        found.append(total)
    return found
