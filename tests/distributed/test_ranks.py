"""The processes that the other tests run on: one that fails, hangs or dies is reported."""

import os
import time

import pytest
import torch
from torch import distributed as dist

from ranks import Ranks


def add_up(rank, world, start):
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return world, int(total)


def fail_on_one(rank, world):
    if rank == 1:
        raise ValueError("one of us is wrong")
    dist.barrier()


def hang(rank, world):
    time.sleep(3600)


def die(rank, world):
    os._exit(3)


def test_every_rank_answers_and_what_one_raises_is_reported(run):
    assert run(4, add_up, 10) == [(4, 46)] * 4
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*ValueError: one of us is wrong"):
        run(2, fail_on_one)
    assert run(2, add_up, 10) == [(2, 21)] * 2


@pytest.mark.slow
def test_one_that_hangs_or_dies_is_reported_and_none_is_left(tmp_path):
    ranks = Ranks(1)
    with pytest.raises(TimeoutError, match=r"ranks \[0\] hung for 2 seconds in hang"):
        ranks.run(1, tmp_path, hang, seconds=2)
    assert not ranks.processes
    with pytest.raises(ChildProcessError, match="rank 0 died in die with exit code 3"):
        ranks.run(1, tmp_path, die)
    assert not ranks.processes
