"""What is wrong on one rank is an error on every rank, at once, and nothing has changed."""

import copy

import pytest
import torch
from torch.nn import functional as F

from joined import assert_same_training, made, shares, single, stream, train
from tiny import assert_same


def other_damping(_, optimizer):
    optimizer.param_groups[0]["damping"] = 0.04


def failing_interval(_, optimizer):
    def interval(step):
        raise KeyError("the user's own")

    optimizer.param_groups[0]["update_interval"] = interval


def wrong_mask(_, optimizer):
    optimizer.row_mask = torch.ones(2, 9, dtype=torch.bool)


def nan_rows(_, optimizer):
    """As a forward pass of only this rank leaves them."""
    optimizer.curvature["head"].statistics.sums()[1].rows.fill_(torch.nan)


FAULTS = {  # what is done on the second rank, its error, and the cause
    "row-mask": (wrong_mask, RuntimeError, "row_mask .* fits no layer"),
    "interval-raises": (failing_interval, KeyError, "the user's own"),
    "other-damping": (other_damping, RuntimeError, "damping=0.05', rank 1 has .*0.04"),
    "nan": (nan_rows, FloatingPointError, "layers head hold NaN or inf"),
}


def backward(model, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def faulty(rank, world, name):
    """The fault on the first step; then, without it, the training goes on like one process."""
    fault, error, match = FAULTS[name]
    batches = list(stream(4))
    model, optimizer = made("ddp")
    group = dict(optimizer.param_groups[0])
    backward(model, shares(batches, rank, world)[0])
    before = copy.deepcopy(model.state_dict())
    if rank == 1:
        fault(model, optimizer)
    # all ranks see in their sums that some are NaN
    with pytest.raises(error if rank == 1 or name == "nan" else RuntimeError, match=match):
        optimizer.step()
    assert_same(before, model.state_dict())
    optimizer.zero_grad()
    optimizer.row_mask = None
    optimizer.param_groups[0].update(group)
    decisions = train(model, optimizer, shares(batches, rank, world))
    twin, other = single()
    assert_same_training((model, optimizer, decisions), (twin, other, train(twin, other, batches)))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_raised_on_all(run, name):
    run(2, faulty, name)


def made_otherwise(rank, world, options, match):
    """The second rank has these options; the first has the defaults."""
    model, optimizer = made("ddp", **(options if rank else {}))
    ((inputs, labels),) = shares(stream(1), rank, world)
    output = model(inputs)
    if optimizer.fisher == "sampled":
        optimizer.sample_fisher(output)
    F.cross_entropy(output, labels).backward()
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fisher": "sampled"}, "fisher='empirical'.*rank 1 has .*fisher='sampled'.*same options"),
        (
            {"distributed": {"communication_dtype": torch.bfloat16}},
            "rank 1 has .*torch.bfloat16.*same",
        ),
    ],
)
def test_options_that_differ(run, options, match):
    run(2, made_otherwise, options, match)
