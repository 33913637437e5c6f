"""Ranks that mean to train with other processes are told so at the first step, before one waits for another in vain."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from joined import OPTIONS, alone, assert_same_training, copies, mean_loss, network, share, stream, train
from tiny import assert_same
from torch_thor import THOR, Distributed
from torch_thor.distributed import announcement


def group_of(choice, world):
    """What a rank gives: None, False, or one of the groups that all ranks make."""
    every = [(0, 1), (0,), (1,), (1, 2)]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in every if max(ranks) < world}
    return groups[choice] if isinstance(choice, tuple) else choice


def differing(rank, world, choices):
    """DDP over all ranks, and THOR with a group that differs; then they mend it, and train as one process."""
    group = group_of(choices[rank], world)
    model = network()
    optimizer = THOR(model, **OPTIONS, distributed=Distributed(process_group=group))
    wrapped = DDP(model)
    batches = list(stream(4))
    inputs, labels = share(batches[0], rank, world)
    mean_loss(wrapped(inputs), labels).backward()
    before = copies(model, optimizer)
    # those that train alone are told as long as they listen: here until they are
    with (
        mock.patch.object(announcement, "LISTEN_SECONDS", 600.0),
        pytest.raises(RuntimeError, match="do not train with the same processes: rank") as raised,
    ):
        optimizer.step()
    after = copies(model, optimizer)
    assert_same(before[0], after[0])
    assert after[1]["state"] == {}
    optimizer.zero_grad()
    optimizer.process_group = None
    decisions = train(wrapped, optimizer, [share(b, rank, world) for b in batches])
    twin, its_optimizer = alone()
    assert_same_training((wrapped, optimizer, decisions), (twin, its_optimizer, train(twin, its_optimizer, batches)))
    return str(raised.value)


CHOICES = [
    (None, False),
    (False, None),
    (None, (1,)),
    ((0,), None),
    ((0, 1), False),
    (None, (1, 2), (1, 2)),
    (None, None, False),
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_another_group_on_one_rank_is_told_on_all(run, choices):
    messages = run(len(choices), differing, choices)
    for message in messages:
        assert "Give process_group= alike" in message
    if choices == (None, False):
        assert "rank 0 has a process group of ranks 0, 1, rank 1 has process_group=False" in messages[0]
        assert "rank 1 has process_group=False, rank 0 has a process group of ranks 0, 1" in messages[1]


def never_comes(rank, world):
    """The second rank never steps: an error that says so when the time of the group is up, and no collective."""
    model = network()
    optimizer = THOR(model, **OPTIONS)
    wrapped = DDP(model)
    inputs, labels = share(next(stream(1)), rank, world)
    mean_loss(wrapped(inputs), labels).backward()
    if rank == 1:
        dist.barrier()  # until the first one has given up
        return
    limit, now = dist.distributed_c10d._get_default_store().timeout, [0.0]
    hours = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.append(now.pop() + 3600))
    with (
        mock.patch.object(announcement, "time", hours),  # by whose clock every pause takes an hour
        pytest.raises(RuntimeError, match=f"not all of them have come to a step of THOR in {limit}"),
    ):
        optimizer.step()
    dist.barrier()


def test_a_rank_that_never_steps(run):
    run(2, never_comes)


def tiny(width):
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(50, width), nn.Tanh(), nn.Linear(width, 5)).double()


def step_alone(model, optimizer):
    for (pixels, _), labels in stream(2):
        mean_loss(model(pixels), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def trials(rank, world):
    """What is right is not complained of: trials of other models on one rank, two optimizers, groups of their own."""
    with mock.patch.object(announcement, "LISTEN_SECONDS", 0.2):
        if rank == 0:
            other = tiny(7)
            step_alone(other, THOR(other, distributed=Distributed(process_group=False)))
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        trainings = [(tiny(4), None), (tiny(6), None), (tiny(8), halves[rank // 2]), (tiny(9), False)]
        for model, group in trainings:
            optimizer = THOR(model, distributed=Distributed(process_group=group))
            wrapped = model if group is False else DDP(model, process_group=group)
            step_alone(wrapped, optimizer)
            assert optimizer.param_groups[0]["step"] == 2
        # the same model again: a second training in one program
        again = tiny(4)
        step_alone(DDP(again), THOR(again))


def test_what_is_right_is_not_complained_of(run):
    run(4, trials)


def asked_once(rank, world):
    """The store is asked at the first step alone."""
    model = network()
    optimizer = THOR(model, **OPTIONS)
    wrapped = DDP(model)
    batches = [share(b, rank, world) for b in stream(5)]
    train(wrapped, optimizer, batches[:1])
    with mock.patch.object(announcement, "Announcement", side_effect=AssertionError):
        train(wrapped, optimizer, batches[1:])


def test_the_others_are_asked_once(run):
    run(2, asked_once)
