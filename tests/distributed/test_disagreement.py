"""What is wrong on one rank is an error on every rank, at once, and nothing has changed."""

import copy
import warnings
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from joined import alone, assert_same_training, made, shares, stream, train
from tiny import assert_same
from torch_thor.curvature import inverse
from torch_thor.curvature.blocks import Blocks


def option(**options):
    return lambda model, optimizer: optimizer.param_groups[0].update(options)


def failing(step):
    raise KeyError("the user's own")


def nan_rows(_, optimizer):
    """As a forward pass of this rank alone leaves them."""
    optimizer.curvature["head"].statistics.sums()[1].rows.fill_(torch.nan)


def forget(_, optimizer):
    optimizer._curvature.capture.gathering.discard(optimizer.curvature["rows"])


def without_gradient(model, _):
    model.module.rows.weight.grad = None


def attribute(name, value):
    return lambda model, optimizer: setattr(optimizer, name, value)


NO_MASK = torch.ones(2, 9, dtype=torch.bool)
FAULTS = {  # what is done on the second rank, its error, and the cause
    "loss-terms": (attribute("loss_terms", lambda: 0), ValueError, "loss_terms=0"),
    "row-mask": (attribute("row_mask", NO_MASK), RuntimeError, "row_mask .* fits no layer"),
    "interval": (option(update_interval=lambda step: 0), ValueError, r"update_interval\(0\)=0"),
    "interval-raises": (option(update_interval=failing), KeyError, "the user's own"),
    "other-interval": (option(update_interval=4), RuntimeError, "is step 3', rank 1 .* is step 4'"),
    "other-damping": (option(damping=0.04), RuntimeError, "damping=0.05', rank 1 has .*0.04"),
    "other-lr": (option(lr=0.5), RuntimeError, "lr=0.02', rank 1 has .* lr=0.5'.*schedule it"),
    "due": (forget, RuntimeError, "rank 0 has .*layer 'rows'.*rank 1 has .*layer 'head'"),
    "nan": (nan_rows, FloatingPointError, "layers head hold NaN or inf"),
    "no-gradient": (without_gradient, RuntimeError, "gradient=True.*gradient=False"),
}


def backward(model, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def faulty(rank, world, name):
    """The fault on the first step; then, without it, the training goes on as one process's."""
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
    optimizer.row_mask = optimizer.loss_terms = None
    optimizer.param_groups[0].update(group)
    optimizer._curvature.capture.listen()
    decisions = train(model, optimizer, shares(batches, rank, world))
    twin, other = alone()
    assert_same_training((model, optimizer, decisions), (twin, other, train(twin, other, batches)))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_raised_on_all(run, name):
    run(2, faulty, name)


SAMPLED = {"fisher": "sampled"}
BFLOAT16 = {"distributed": {"communication_dtype": torch.bfloat16}}
# options of both ranks, those of the second alone, and what both are told
OTHERS = {
    "fisher": ({}, SAMPLED, "fisher='empirical'.*rank 1 has .*fisher='sampled'.*same options"),
    "dtype": ({}, BFLOAT16, "rank 1 has .*torch.bfloat16.*same"),
    "labels of one rank": (SAMPLED, {}, "rank 0 has .sampled labels.*rank 1 has .sampled labels"),
}


def made_otherwise(rank, world, name):
    options, of_second, match = OTHERS[name]
    model, optimizer = made("ddp", **options, **(of_second if rank else {}))
    ((inputs, labels),) = shares(stream(1), rank, world)
    output = model(inputs)
    if optimizer.fisher == "sampled" and (of_second or rank == 0):
        optimizer.sample_fisher(output)
    F.cross_entropy(output, labels).backward()
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()


@pytest.mark.parametrize("name", OTHERS)
def test_options_or_labels_that_differ(run, name):
    run(2, made_otherwise, name)


def unlike(rank, world):
    """What unlike hardware would do: other traces, a factorisation that fails on one rank."""
    really_invert, really_trace, seen = inverse.invert_own, Blocks.traces, []

    def invert(blocks, damping):
        inverses, levels = really_invert(blocks, damping)
        return inverses, [inverse.NOT_POSITIVE, *levels[1:]] if rank == 1 else levels

    model, optimizer = made("ddp", trace_thresholds=(0.05, 0.05))
    with (
        mock.patch.object(Blocks, "traces", lambda blocks: really_trace(blocks) * (1 + 0.2 * rank)),
        mock.patch.object(inverse, "invert_own", invert),
        warnings.catch_warnings(record=True),
    ):
        warnings.simplefilter("always")
        batches = shares(stream(7), rank, world)
        for batch in batches:
            train(model, optimizer, [batch])
            seen.append(optimizer.last_refresh)
    return seen


def test_ranks_that_would_decide_otherwise_decide_alike(run):
    left, right = run(2, unlike)
    assert left == right
    assert "FAILED" in {event.decision.name for step in left for event in step}
