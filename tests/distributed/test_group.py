"""`torch_thor.Distributed`, a group of one process, who owns which blocks, and a failing rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from tiny import assert_same, batches, mlp, train, weights
from torch_thor import THOR, Distributed
from torch_thor.distributed.assignment import assign, cost


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("process_group", [True, "gloo", [0, 1]], "default group, or False"),
        ("whole_matrices", ["yes", None], "True or False"),
        ("communication_dtype", [torch.float16], "None, torch.bfloat16 or torch.float32"),
    ],
)
def test_what_is_wrong_is_refused(name, values, rule):
    for value in values:
        with pytest.raises(ValueError, match=f"(?s)^{name}=.*: {name} must be .*{rule}"):
            Distributed(**{name: value})


def test_a_group_of_one_process_has_the_bits_of_no_group(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        trained = []
        for group in (dist.group.WORLD, None, False):
            torch.manual_seed(0)
            model = mlp()
            optimizer = THOR(model, distributed=Distributed(process_group=group))
            train(model, optimizer, batches(3))
            trained.append((weights(model), optimizer.state_dict()))
    finally:
        dist.destroy_process_group()
    for each in trained:
        assert_same(each, trained[0])


SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300)), max_size=12)


@given(SHAPES, st.integers(1, 9))
def test_every_block_has_one_owner_and_work_differs_by_one_block_at_most(parts, processes):
    """When a process was given its last block, it had the least work of all."""
    bounds = assign(tuple(parts), processes)
    loads, last = [0] * processes, [0] * processes
    for (count, size), edges in zip(parts, bounds, strict=True):
        assert (len(edges), edges[0], edges[-1]) == (processes + 1, 0, count)
        assert list(edges) == sorted(edges)
        for rank in range(processes):
            own = edges[rank + 1] - edges[rank]
            loads[rank] += own * cost(size)
            last[rank] = max(last[rank], cost(size) if own else 0)
    assert max(load - its for load, its in zip(loads, last, strict=True)) <= min(loads)


def fail_on_second(rank, world):
    if rank == 1:
        raise ValueError("this rank is wrong")
    dist.barrier()


def test_what_a_rank_of_a_test_raises_is_reported(run):
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*ValueError: this rank is wrong"):
        run(2, fail_on_second)
