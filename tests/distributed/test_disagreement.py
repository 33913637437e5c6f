"""What is wrong on one rank is an error on every rank, at once, with the cause; and nothing has changed."""

import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from joined import alone, assert_same_training, copies, digest, mean_loss, network, parallel, share, stream, train
from sharded import mesh_of, sharded
from tiny import assert_same
from torch_thor import THOR, intervals
from torch_thor.curvature import BlockDiagonal, inverse


def sharded_network(rank, world, **options):
    return sharded(mesh_of((world,)), **options)


def own_rows(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gradient_step(model, batch, rank, world):
    inputs, labels = share(batch, rank, world)
    mean_loss(model(inputs), labels).backward()


def wrong_loss_terms(rank, model, optimizer):
    optimizer.loss_terms = (lambda: 0) if rank == 1 else None


def wrong_interval(rank, model, optimizer):
    if rank == 1:
        optimizer.param_groups[0]["update_interval"] = lambda step: 0


def failing_interval(rank, model, optimizer):
    def interval(step):
        raise KeyError("the user's own")

    if rank == 1:
        optimizer.param_groups[0]["update_interval"] = interval


def other_interval(rank, model, optimizer):
    if rank == 1:
        optimizer.param_groups[0]["update_interval"] = 4


def other_schedule(rank, model, optimizer):
    optimizer.param_groups[0]["update_interval"] = intervals.Piecewise([2, 8], [3 + rank, 5, 6])


def other_callable(rank, model, optimizer):
    optimizer.param_groups[0]["update_interval"] = lambda step: 3 + rank


def wrong_damping(rank, model, optimizer):
    if rank == 1:
        optimizer.param_groups[0]["damping"] = 0.0


def other_damping(rank, model, optimizer):
    if rank == 1:
        optimizer.param_groups[0]["damping"] = 0.04


def other_learning_rate(rank, model, optimizer):
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5


def wrong_mask(rank, model, optimizer):
    optimizer.row_mask = torch.ones(2, 9, dtype=torch.bool) if rank == 1 else None


def fewer_layers(rank, model, optimizer):
    if rank == 1:
        optimizer._registry.capture.release(optimizer.curvature["rows"])


def nan_gradient(rank, model, optimizer):
    if rank == 1:
        model.module.head.weight.grad[0, 0] = torch.nan


def other_gradient(rank, model, optimizer):
    if rank == 1:
        for p in model.parameters():
            p.grad.mul_(1.01)


def missing_gradient(rank, model, optimizer):
    if rank == 1:
        model.module.rows.weight.grad = None


FAULTS = {
    "loss-terms": (wrong_loss_terms, ValueError, "loss_terms=0"),
    "interval": (wrong_interval, ValueError, r"update_interval\(0\)=0"),
    "interval-raises": (failing_interval, {0: RuntimeError, 1: KeyError}, "the user's own"),
    "other-interval": (
        other_interval,
        RuntimeError,
        "makes step 3 the next.*rank 1 has .*makes step 4",
    ),
    "other-schedule": (
        other_schedule,
        RuntimeError,
        "makes step 3 the next.*rank 1 has .*makes step 4",
    ),
    "other-callable": (
        other_callable,
        RuntimeError,
        "makes step 3 the next.*rank 1 has .*makes step 4",
    ),
    "damping": (wrong_damping, ValueError, "damping=0.0"),
    "other-damping": (other_damping, RuntimeError, "rank 0 has 'parameter group 0: damping=0.05', rank 1 has .*0.04"),
    "other-lr": (other_learning_rate, RuntimeError, r"lr=0.02', rank 1 has 'parameter group 0: lr=0.5'.*schedule it"),
    "row-mask": (wrong_mask, RuntimeError, r"row_mask of shape \(2, 9\) fits no layer"),
    "due": (fewer_layers, RuntimeError, "makes step 3 the next.*rank 1 has .*makes step 1"),
    "nan": (nan_gradient, FloatingPointError, "step 0: the gradients of head.weight hold NaN"),
    "gradients": (other_gradient, RuntimeError, "gradients differ between ranks.*DistributedDataParallel"),
    "no-gradient": (missing_gradient, RuntimeError, "gradient=True.*gradient=False"),
}


def faulty(rank, world, name):
    """The fault on the first step; then, without it, the training goes on as one process's."""
    fault, error, match = FAULTS[name]
    error = error[rank] if isinstance(error, dict) else error
    batches = list(stream(4))
    model, optimizer = parallel(rank, world)
    interval = optimizer.param_groups[0]["update_interval"]
    gradient_step(model, batches[0], rank, world)
    before = copies(model, optimizer)
    fault(rank, model, optimizer)
    with pytest.raises(error, match=match) as raised:
        optimizer.step()
    if rank == 0 and "rank 0" not in str(raised.value):
        assert str(raised.value).startswith("on rank 1: ") or "differ between ranks" in str(raised.value)
    after = copies(model, optimizer)
    assert_same(before[0], after[0])
    assert before[1]["state"] == after[1]["state"] == {}
    optimizer.zero_grad()
    optimizer.row_mask = optimizer.loss_terms = None
    optimizer.param_groups[0].update(update_interval=interval, damping=0.05, lr=0.02)
    optimizer._registry.capture.want(optimizer.curvature.values())
    decisions = train(model, optimizer, [share(b, rank, world) for b in batches])
    twin, its_optimizer = alone()
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, train(twin, its_optimizer, batches)))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_raised_on_all(run, name):
    run(2, faulty, name)


def changed_between(rank, world):
    """By hand, on one rank: the interval is asked at the next refresh, and there the ranks find out."""
    batches = [share(b, rank, world) for b in stream(6)]
    model, optimizer = parallel(rank, world)
    train(model, optimizer, batches[:2])
    optimizer.param_groups[0]["update_interval"] = 3 + rank
    train(model, optimizer, batches[2:3])
    inputs, labels = batches[3]
    mean_loss(model(inputs), labels).backward()
    before = copies(model, optimizer)
    with pytest.raises(RuntimeError, match=r"rank 0 has .*makes step 6 the next refresh.*rank 1 has .*makes step 7"):
        optimizer.step()
    after = copies(model, optimizer)
    assert_same(before[0], after[0])
    assert str(before[1]) == str(after[1])


def test_an_interval_that_is_changed_on_one_rank(run):
    run(2, changed_between)


def not_called(x, layer):
    return F.linear(x, layer.weight, layer.bias)


class Called(nn.Module):
    """Two layers, of which the second may be used without being called, or inside torch.func."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)
        self.way = "called"

    def forward(self, x):
        x = torch.tanh(self.body(x))
        if self.way == "vmapped":
            return torch.func.vmap(self.head)(x)
        return not_called(x, self.head) if self.way == "used" else self.head(x)


def make_called():
    torch.manual_seed(3)
    return Called().double()


def silent(rank, world, ways, message):
    """Two steps; returns what the ranks must have alike."""
    model, optimizer = parallel(rank, world, make_called, update_interval=1)
    model.module.way = ways[rank]
    said = []
    for _ in range(2):
        x = torch.randn(4, 5, dtype=torch.float64)
        model(x).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(w.message) for w in caught if "head" in str(w.message)]
        optimizer.zero_grad()
    assert len(said) == (message is not None)
    assert message is None or message in said[0]
    assert optimizer.curvature["head"].uncalled == (message is not None)
    assert optimizer.curvature["body"].refreshes == 2
    return digest(model, optimizer)


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (("used", "used"), "without calling the module"),
        (("used", "vmapped"), "inside a torch.func transform"),
        (("called", "used"), None),  # as a layer that only one rank reaches: its rows are all there are
    ],
    ids=["nowhere", "inside-a-transform", "on-one-rank"],
)
def test_statistics_that_never_came(run, ways, message):
    """All ranks decide alike which layers are not called, and go on with the same numbers."""
    one, other = run(2, silent, ways, message)
    assert one == other


def skipping(rank, world):
    """NaN on one rank with nonfinite="skip": through DDP on all of them, and by hand on one alone.

    First in a step that would refresh, then in an ordinary one.
    """
    batches, decisions = list(stream(5)), []
    model, optimizer = parallel(rank, world, nonfinite="skip")
    for ordinary in (False, True):
        for by_hand in (False, True):
            inputs, labels = share(batches[4], rank, world)
            loss = mean_loss(model(inputs), labels)
            (loss * (torch.nan if rank == 1 and not by_hand else 1.0)).backward()
            if by_hand and rank == 1:
                model.module.head.bias.grad[0] = torch.inf
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.skipped_steps == (4 if ordinary else 2)
        part = batches[2:4] if ordinary else batches[:2]
        decisions += train(model, optimizer, [share(b, rank, world) for b in part])
    twin, its_optimizer = alone()
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, train(twin, its_optimizer, batches[:4])))
    return digest(model, optimizer)


def test_a_step_that_one_rank_skips_is_skipped_by_all(run):
    left, right = run(2, skipping)
    assert left == right


# what an ordinary step sends: a sum over all rows, rows of matrices, inverses
SENDING = {
    "kl-clip": (sharded_network, {"kl_clip": 1e-3, "max_update_ratio": None}),
    "whole-matrices": (sharded_network, {"scaling": "spectral", "whole_matrices": True, "damping": 0.1}),
    "divided": (parallel, {"divide_curvature": True}),
    "divided-shards": (sharded_network, {"divide_curvature": True}),
}


def nan_before_sending(rank, world, name):
    """NaN on one rank in an ordinary step raises on all, and the training goes on as one without it."""
    make, options = SENDING[name]
    batches, results = [share(b, rank, world) for b in stream(5)], []
    for spoilt in (True, False):
        model, optimizer = make(rank, world, **options)
        train(model, optimizer, batches[:1])
        inputs, labels = batches[4]
        mean_loss(model(inputs), labels).backward()
        if rank == 1:
            own_rows(next(model.parameters()).grad)[0] = torch.nan
        if spoilt:
            with pytest.raises(FloatingPointError, match=r"step 1: .* hold NaN"):
                optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, batches[1:4])
        results.append([own_rows(p.detach()) for p in model.parameters()])
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:.*returns a view")
@pytest.mark.parametrize("name", SENDING)
def test_nan_on_one_rank_before_an_update_that_sends(run, name):
    run(2, nan_before_sending, name)


def nan_statistics(rank, world):
    """Statistics that overflow on one rank, with sound gradients: no rank takes them."""
    model, optimizer = parallel(rank, world, make_called)
    x = torch.randn(4, 5, dtype=torch.float64)
    for step in range(5):
        model(x).square().mean().backward()
        if step == 3 and rank == 1:
            optimizer.curvature["head"].statistics.sums()[0].blocks[0, 0, 0] = torch.nan
        if step == 3:
            with pytest.warns(RuntimeWarning, match="layer 'head': its new factors hold NaN"):
                optimizer.step()
            assert {e.layer: e.decision.name for e in optimizer.last_refresh}["head"] == "FAILED"
        else:
            optimizer.step()
        optimizer.zero_grad()
    return digest(model, optimizer)


def test_nan_in_the_statistics_of_one_rank(run):
    left, right = run(2, nan_statistics)
    assert left == right


def without_ddp(rank, world):
    """Training without DDP, by mistake, is told on the first step."""
    model = network()
    optimizer = THOR(model)
    gradient_step(model, next(stream(1)), rank, world)
    with pytest.raises(RuntimeError, match=r"wrap the model in DistributedDataParallel.*process_group=False"):
        optimizer.step()


def test_gradients_that_nobody_averages(run):
    run(2, without_ddp)


def unlike(rank, world):
    """What unlike hardware would do, in large: other traces, and a factorisation that fails on one rank."""
    really_invert, really_trace = inverse.invert_own_, BlockDiagonal.group_traces

    def other_traces(factor):
        return really_trace(factor) * (1 + 0.2 * rank)

    def invert(damped):
        really_invert(damped)
        if rank == 1:
            damped[0][0].failed = True

    model, optimizer = parallel(rank, world, trace_thresholds=(0.05, 0.05))
    with (
        mock.patch.object(BlockDiagonal, "group_traces", other_traces),
        mock.patch.object(inverse, "invert_own_", invert),
        warnings.catch_warnings(record=True),
    ):
        warnings.simplefilter("always")
        decisions = train(model, optimizer, [share(b, rank, world) for b in stream(7)])
    return [{k: (e.decision.name, e.trace_change) for k, e in step.items()} for step in decisions]


def test_ranks_that_would_decide_otherwise_decide_alike(run):
    left, right = run(2, unlike)
    assert left == right
    assert "FAILED" in {decision for step in left for decision, _ in step.values()}
