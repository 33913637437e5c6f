"""DDP on 1, 2 and 4 ranks takes the steps of one process on the joined batch, in float64, over several refreshes."""

import functools
import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from joined import (
    Checkpointed,
    alone,
    as_one_process,
    assert_same_training,
    digest,
    made,
    routed,
    shares,
    stream,
    sum_over,
    train,
)
from torch_thor import THOR, ThorMuon

STEPS = 14
EVERY_STEP = {"update_interval": 1, "trace_thresholds": (0.0, 0.0)}
EVERY_OTHER = {"update_interval": 2, "trace_thresholds": (0.0, 0.0)}


class LeastLikely(Categorical):
    """Its label does not depend on the rank."""

    def sample(self, sample_shape=()):
        return self.logits.argmin(-1)


def least_likely(logits):
    return LeastLikely(logits=logits)


def frozen_inside():
    model = routed(inner=True)
    for frozen in (model.experts.weight, model.rnn.weight_hh_l0):
        frozen.requires_grad_(False)
    return model


CASES = {
    "plain": {},
    "static graph": {"ddp": {"static_graph": True, "gradient_as_bucket_view": True}},
    "accumulation": {"micro": 3},
    "unused allowed": {"ddp": {"find_unused_parameters": True}, "nesterov": True, "weight_decay": 0.1},
    "whole factors, clipped": {"split_dim": None, "kl_clip": 1e-3, "factor_decay": 0.6},
    # of a softmax's gradient one direction is rounding alone, which polar factors raise to some 1e-9
    "ThorMuon": {"method": ThorMuon, "damping": 0.1, "count": 8, "rtol": 1e-6, "atol": 1e-8},
    "every step": {**EVERY_STEP, "count": 6},
    "experts": {"make": routed, **EVERY_OTHER, "count": 6},
    "inner layers": {"make": functools.partial(routed, inner=True), **EVERY_OTHER, "count": 5},
    "inner layers, frozen, accumulation": {"make": frozen_inside, **EVERY_OTHER, "count": 5, "micro": 3},
    "checkpointed": {"make": functools.partial(Checkpointed, False), "ddp": {"static_graph": True}},
    "checkpointed, reentrant": {"make": functools.partial(Checkpointed, True), "ddp": {"static_graph": True}},
    # the pass of sampled labels averages no gradient
    "sampled": {"fisher": "sampled", "count": 5},
    "sampled, static graph": {"fisher": "sampled", "count": 5, "ddp": {"static_graph": True}},
    "sampled, unused allowed": {"fisher": "sampled", "count": 5, "ddp": {"find_unused_parameters": True}},
    "sampled, accumulation": {"fisher": "sampled", "count": 5, "micro": 3},
}


def ordinarily(model, optimizer, first, step, count, micro):
    batches = list(stream(count))
    for (_, words), _ in batches:  # expert 4 has rows of the first example alone
        words[0, 0] = 4
        words[1:] -= (words[1:] % 5 == 4).long()

    def loss(output, labels):
        if optimizer.fisher == "sampled":
            optimizer.sample_fisher(output, least_likely)
        return F.cross_entropy(output, labels)

    return train(model, optimizer, shares(batches, first, step), loss, micro=micro if step > 1 else 1)


def ordinary(rank, world, count=STEPS, micro=1, **options):
    return as_one_process(rank, world, functools.partial(ordinarily, count=count, micro=micro), **options)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_on_the_joined_batch(run, world, name):
    decisions, digests = zip(*run(world, functools.partial(ordinary, **CASES[name])), strict=True)
    assert len(set(digests)) == 1, "the ranks differ in some bit"
    if name == "plain":
        assert {kind for step in decisions[0] for kind in step.values()} == {"UPDATE", "KEEP", "STOP"}


def one_rank(rank, world):
    (model, optimizer), (twin, other) = made("ddp"), alone()
    train(model, optimizer, stream(6))
    train(twin, other, stream(6))
    return digest(model, optimizer) == digest(twin, other)


def test_one_rank_has_the_bits_of_no_group(run):
    assert run(1, one_rank) == [True]


def summed(rank, world):
    """DDP divides the gradient of a sum by the ranks: every direction is 1/P of one process's."""
    options = {"loss_reduction": "sum", "max_update_ratio": None}
    model, optimizer = made("ddp", **options, lr=0.01 * world, weight_decay=0.1 / world)
    twin, other = alone(**options, lr=0.01, weight_decay=0.1)
    decisions = train(model, optimizer, shares(stream(STEPS), rank, world), loss=sum_over(8))
    wanted = train(twin, other, stream(STEPS), loss=sum_over(8))
    for q in twin.parameters():
        other.state[q]["momentum_buffer"] /= world
    assert_same_training((model, optimizer, decisions), (twin, other, wanted))


@pytest.mark.parametrize("world", [2, 4])
def test_sums_of_losses(run, world):
    run(world, summed)


def sum_given_as_mean(rank, world):
    generator = torch.Generator().manual_seed(11)
    x, y = (torch.randn(64, width, generator=generator)[rank::world] for width in (6, 40))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 40))
    optimizer, wrapped = THOR(model), DDP(model)
    F.mse_loss(wrapped(x), y, reduction="sum").backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(w.message) for w in caught if "looks like a sum" in str(w.message)]


def test_a_sum_that_is_given_as_a_mean_is_told(run):
    for (told,) in run(2, sum_given_as_mean):
        assert "a sum over the 64 loss terms" in told
        assert 'loss_reduction="sum"' in told


def test_synchronised_batch_norm_is_a_norm():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)))
    reasons = {entry.name: entry.reason for entry in THOR(model).coverage() if entry.kind == "SyncBatchNorm"}
    assert reasons == {"1.weight": "a normalisation layer", "1.bias": "a normalisation layer"}


def pairs_of_ranks(rank, world):
    """Two trainings of two ranks each, given their own groups."""
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    batches = list(stream(STEPS + rank // 2))[-STEPS:]
    model, optimizer = made("ddp", ddp={"process_group": mine}, distributed={"process_group": mine})
    decisions = train(model, optimizer, shares(batches, rank % 2, 2))
    twin, other = alone()
    assert_same_training((model, optimizer, decisions), (twin, other, train(twin, other, batches)))
    return digest(model, optimizer)


def test_groups_of_their_own(run):
    digests = run(4, pairs_of_ranks)
    assert digests[0] == digests[1] != digests[2] == digests[3]


ORDERS = {
    "compile, then DDP": lambda model, backend: DDP(torch.compile(model, backend=backend)),
    "DDP, then compile": lambda model, backend: torch.compile(DDP(model), backend=backend),
}


def compiled(rank, world, order):
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    ordinary(rank, world, count=7, ddp=lambda model: ORDERS[order](model, backend))
    return bool(calls)


@pytest.mark.parametrize("order", ORDERS)
def test_compiled_on_ordinary_steps(run, order):
    assert all(run(2, compiled, order))
