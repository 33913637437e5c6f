"""An optimizer that is a class with its options and its step divides its work over processes."""

import pytest

from joined import ROWS, as_one_process, shares, stream, train
from third_optimizer import NaturalSGD

WAYS = {
    "ddp": {},
    "divided": {"distributed": {"divide_curvature": True}},
    "fsdp": {"way": (2,), "split_dim": 1, "layers": ROWS["layers"]},
}


def go(model, optimizer, first, step):
    return train(model, optimizer, shares(stream(7), first, step))


def ranks_and_one(rank, world, name):
    return as_one_process(rank, world, go, method=NaturalSGD, **WAYS[name])


@pytest.mark.parametrize("name", ["ddp", pytest.param("divided", marks=pytest.mark.slow), "fsdp"])
def test_two_processes_take_the_steps_of_one(run, name):
    run(2, ranks_and_one, name)
