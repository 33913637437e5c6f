"""The processes that the other tests run on: one that fails is reported."""

import pytest
import torch
from torch import distributed as dist


def add_up(rank, world, start):
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return world, int(total)


def fail_on_one(rank, world):
    if rank == 1:
        raise ValueError("one of us is wrong")
    dist.barrier()


def test_every_rank_answers_and_what_one_raises_is_reported(run):
    assert run(4, add_up, 10) == [(4, 46)] * 4
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*ValueError: one of us is wrong"):
        run(2, fail_on_one)
    assert run(2, add_up, 10) == [(2, 21)] * 2
