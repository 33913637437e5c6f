"""Blocks are summed at their owners and sent to all ranks: against sums over all ranks, and in one collective each."""

from unittest import mock

import torch
from torch import distributed as dist

from torch_thor.distributed.data_parallel import DataParallel

SHAPES = [(5, 4), (1, 7), (0, 3), (9, 1), (2, 7)]


def parts_of(rank):
    """Symmetric blocks of two dtypes, others on each rank."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for i, (count, size) in enumerate(SHAPES):
        blocks = torch.randn(count, size, size, generator=generator, dtype=torch.float64)
        found.append((blocks + blocks.mT).to(torch.float32 if i == 1 else torch.float64))
    return found


def exchange(rank, world):
    """The blocks of float32 have one owner, so they are sent without padding."""
    processes, parts = DataParallel(dist.group.WORLD, torch.device("cpu")), parts_of(rank)
    wanted = [sum(of_ranks) for of_ranks in zip(*[parts_of(r) for r in range(world)], strict=True)]
    bounds = processes.deal_out(parts, [None] * len(parts))
    processes.sum_to_owners_(parts, bounds)
    for part, sums, of_ranks in zip(parts, wanted, bounds, strict=True):
        own = slice(of_ranks[rank], of_ranks[rank + 1])
        torch.testing.assert_close(part[own], sums[own])
        part[: own.start] = torch.nan  # nobody may use what it does not own
        part[own.stop :] = torch.nan
        part[own] += 1e-9 * torch.ones_like(part[own]).triu(1)  # as rounding leaves them
    processes.share_(parts, bounds)
    for part, sums in zip(parts, wanted, strict=True):
        torch.testing.assert_close(part, sums)
    return [part.numpy().tobytes() for part in parts]


def test_sums_of_all_ranks_on_all_ranks(run):
    for world in (2, 4):
        first, *others = run(world, exchange)
        assert all(other == first for other in others)


def sums_on_first(rank, world):
    tensors = [torch.full((2, 3), rank + 1.0), torch.full((1,), rank + 1)]
    sums = DataParallel(dist.group.WORLD, torch.device("cpu")).sum_on_first(tensors)
    assert all((tensor == rank + 1).all() for tensor in tensors)
    return [one.flatten().tolist() for one in sums]


def test_sums_on_the_first_rank(run):
    assert run(2, sums_on_first) == [[[3.0] * 6, [3]], []]


def elements_sent(rank, world):
    parts = [torch.eye(6).repeat(4, 1, 1)]
    processes, sent = DataParallel(dist.group.WORLD, torch.device("cpu")), []
    really = dist.reduce_scatter_tensor, dist.all_gather_into_tensor

    def counting(collective):
        def counted(output, given, **options):
            sent.append(given.numel())
            return collective(output, given, **options)

        return counted

    bounds = processes.deal_out(parts, [None] * len(parts))
    with (
        mock.patch.object(dist, "reduce_scatter_tensor", counting(really[0])),
        mock.patch.object(dist, "all_gather_into_tensor", counting(really[1])),
    ):
        processes.sum_to_owners_(parts, bounds)
        processes.share_(parts, bounds)
    return sent


def test_triangles_are_sent(run):
    """Four blocks of 6 rows, two for each rank."""
    assert run(2, elements_sent) == [[4 * 21, 2 * 21]] * 2
