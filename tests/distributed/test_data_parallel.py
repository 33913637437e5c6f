"""Blocks are packed, summed at their owners and sent to all ranks: against sums over all ranks."""

import torch
from torch import distributed as dist

from torch_thor.distributed.data_parallel import DataParallel

SHAPES = [(5, 4), (1, 7), (0, 3), (9, 1), (2, 7)]


def parts_of(rank):
    """Symmetric blocks; those of float32 have one owner, so nothing is padded."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for i, (count, size) in enumerate(SHAPES):
        blocks = torch.randn(count, size, size, generator=generator, dtype=torch.float64)
        found.append((blocks + blocks.mT).to(torch.float32 if i == 1 else torch.float64))
    return found


def exchange(rank, world):
    processes, parts = DataParallel(dist.group.WORLD, torch.device("cpu")), parts_of(rank)
    wanted = [sum(of_ranks) for of_ranks in zip(*[parts_of(r) for r in range(world)], strict=True)]
    bounds = processes.assign(parts, [None] * len(parts))
    processes.sum_to_owners_(parts, bounds)
    for part, sums, of_ranks in zip(parts, wanted, bounds, strict=True):
        own = slice(of_ranks[rank], of_ranks[rank + 1])
        torch.testing.assert_close(part[own], sums[own])
        part[: own.start] = part[own.stop :] = torch.nan  # nobody may use what it does not own
        part[own] += 1e-9 * torch.ones_like(part[own]).triu(1)  # as rounding leaves them
    processes.share_(parts, bounds)
    for part, sums in zip(parts, wanted, strict=True):
        torch.testing.assert_close(part, sums)
    return [part.numpy().tobytes() for part in parts]


def test_sums_of_all_ranks_on_all_ranks(run):
    for world in (2, 4):
        first, *others = run(world, exchange)
        assert all(other == first for other in others)
