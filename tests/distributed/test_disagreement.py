"""What is wrong on one rank is an error on every rank, at once, with the cause; and nothing has
changed.
"""

import copy
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from joined import alone, assert_same_training, digest, made, shares, stream, train
from tiny import assert_same
from torch_thor.curvature import inverse
from torch_thor.curvature.blocks import Blocks


def option(**options):
    return lambda model, optimizer: optimizer.param_groups[0].update(options)


def failing(step):
    raise KeyError("the user's own")


NEXT = "makes step 3 the next.*rank 1 has .*makes step 4"
FAULTS = {  # what is done on the second rank, the error of both (or of each), and the cause
    "loss-terms": (lambda _, o: setattr(o, "loss_terms", lambda: 0), ValueError, "loss_terms=0"),
    "interval": (option(update_interval=lambda step: 0), ValueError, r"update_interval\(0\)=0"),
    "interval-raises": (
        option(update_interval=failing),
        (RuntimeError, KeyError),
        "the user's own",
    ),
    "other-interval": (option(update_interval=4), RuntimeError, NEXT),
    "damping": (option(damping=0.0), ValueError, "damping=0.0"),
    "other-damping": (
        option(damping=0.04),
        RuntimeError,
        "group 0: damping=0.05', rank 1 has .*0.04",
    ),
    "other-lr": (
        option(lr=0.5),
        RuntimeError,
        r"lr=0.02', rank 1 has 'parameter group 0: lr=0.5'.*schedule it",
    ),
    "row-mask": (
        lambda _, o: setattr(o, "row_mask", torch.ones(2, 9, dtype=torch.bool)),
        RuntimeError,
        r"row_mask of shape \(2, 9\) fits no layer",
    ),
    "due": (
        lambda _, o: o._curvature.capture.gathering.discard(o.curvature["rows"]),
        RuntimeError,
        "rank 0 has .*layer 'rows'.*rank 1 has .*layer 'head'",
    ),
    "nan": (
        lambda model, _: model.module.head.weight.grad[0].fill_(torch.nan),
        FloatingPointError,
        "step 0: the gradients of head.weight hold NaN",
    ),
    "gradients": (
        lambda model, _: [p.grad.mul_(1.01) for p in model.parameters()],
        RuntimeError,
        r"gradients differ between ranks.*wrap the model in "
        r"DistributedDataParallel.*process_group=False",
    ),
    "no-gradient": (
        lambda model, _: setattr(model.module.rows.weight, "grad", None),
        RuntimeError,
        "gradient=True.*gradient=False",
    ),
}


def copies(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def backward(model, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def faulty(rank, world, name):
    """The fault on the first step; then, without it, the training goes on as one process's."""
    fault, error, match = FAULTS[name]
    batches = list(stream(4))
    model, optimizer = made("ddp")
    group = dict(optimizer.param_groups[0])
    backward(model, shares(batches, rank, world)[0])
    before = copies(model, optimizer)
    if rank == 1:
        fault(model, optimizer)
    with pytest.raises(error[rank] if isinstance(error, tuple) else error, match=match) as raised:
        optimizer.step()
    if rank == 0 and "rank 0" not in str(raised.value):
        assert str(raised.value).startswith("on rank 1: ") or "differ between ranks" in str(
            raised.value
        )
    after = copies(model, optimizer)
    assert_same(before[0], after[0])
    assert before[1]["state"] == after[1]["state"] == {}
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
# options of both ranks, and of the second alone; who has no sampled labels; and what both are told
OTHERS = {
    "fisher": ({}, SAMPLED, (), "fisher='empirical'.*rank 1 has .*fisher='sampled'.*same options"),
    "nonfinite": (
        {},
        {"nonfinite": "skip"},
        (),
        "nonfinite='raise'.*rank 1 has .*nonfinite='skip'.*same options",
    ),
    "divided": (
        {},
        {"distributed": {"divide_curvature": True}},
        (),
        "rank 1 has .*divide_curvature=True.*same",
    ),
    "dtype": (
        {},
        {"distributed": {"communication_dtype": torch.bfloat16}},
        (),
        "rank 1 has .*torch.bfloat16.*same",
    ),
    "no labels": (SAMPLED, {}, (0, 1), r"call optimizer.sample_fisher\(output\)"),
    "labels of one rank": (SAMPLED, {}, (1,), "sampled labels: yes.*sampled labels: no"),
}


def made_otherwise(rank, world, name):
    options, of_second, without_labels, match = OTHERS[name]
    model, optimizer = made("ddp", **{**options, **(of_second if rank else {})})
    ((inputs, labels),) = shares(stream(1), rank, world)
    output = model(inputs)
    if optimizer.fisher == "sampled" and rank not in without_labels:
        optimizer.sample_fisher(output)
    F.cross_entropy(output, labels).backward()
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()


@pytest.mark.parametrize("name", OTHERS)
def test_options_or_labels_that_differ(run, name):
    run(2, made_otherwise, name)


class Called(nn.Module):
    """Two layers, of which the second may be used without being called, or inside torch.func."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.way = nn.Linear(5, 6), nn.Linear(6, 3), "called"

    def forward(self, x):
        x = torch.tanh(self.body(x))
        if self.way == "vmapped":
            return torch.func.vmap(self.head)(x)
        return F.linear(x, self.head.weight, self.head.bias) if self.way == "used" else self.head(x)


def make_called():
    torch.manual_seed(3)
    return Called().double()


def silent(rank, world, ways, message):
    """Two steps; returns what the ranks must have alike."""
    model, optimizer = made("ddp", make_called, update_interval=1)
    model.module.way = ways[rank]
    said = []
    for _ in range(2):
        model(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(w.message) for w in caught if "head" in str(w.message)]
        optimizer.zero_grad()
    assert [message in one for one in said] == [True] * (message is not None)
    assert optimizer.curvature["head"].uncalled == (message is not None)
    assert optimizer.curvature["body"].refreshes == 2
    return digest(model, optimizer)


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (("used", "used"), "without calling the module"),
        (("used", "vmapped"), "inside a torch.func transform"),
        (("called", "used"), None),  # its rows are all there are
    ],
    ids=["nowhere", "inside-a-transform", "on-one-rank"],
)
def test_statistics_that_never_came(run, ways, message):
    """All ranks decide alike which layers are not called, and go on with the same numbers."""
    one, other = run(2, silent, ways, message)
    assert one == other


def unlike(rank, world):
    """What unlike hardware would do, in large: other traces, and a factorisation that fails on one
    rank.
    """
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
        train(
            model, optimizer, batches, step=lambda one: (one.step(), seen.append(one.last_refresh))
        )
    return seen


def test_ranks_that_would_decide_otherwise_decide_alike(run):
    left, right = run(2, unlike)
    assert left == right
    assert "FAILED" in {event.decision.name for step in left for event in step}
