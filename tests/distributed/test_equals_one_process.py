"""DDP on 2 and 4 ranks takes the steps of one process on the joined batch, in float64."""

import functools

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from joined import (
    SIZE,
    Checkpointed,
    alone,
    as_one_process,
    assert_same_training,
    digest,
    made,
    marked,
    part,
    routed,
    shares,
    stream,
    sum_over,
    train,
    uneven,
)
from third_optimizer import NaturalSGD
from torch_thor import ThorMuon

STEPS = 14
EVERY_OTHER = {"update_interval": 2, "trace_thresholds": (0.0, 0.0)}


# ---- the ordinary loop ---------------------------------------------------------------------------


class LeastLikely(Categorical):
    """Its label does not depend on the rank."""

    def sample(self, sample_shape=()):
        return self.logits.argmin(-1)


def frozen_inside():
    model = routed(inner=True)
    for frozen in (model.experts.weight, model.rnn.weight_hh_l0):
        frozen.requires_grad_(False)
    return model


def ordinarily(model, optimizer, first, step, count, micro):
    batches = list(stream(count))
    for (_, words), _ in batches:  # expert 4 has rows of the first example alone
        words[0, 0] = 4
        words[1:] -= (words[1:] % 5 == 4).long()

    def loss(output, labels):
        if optimizer.fisher == "sampled":
            optimizer.sample_fisher(output, lambda logits: LeastLikely(logits=logits))
        return F.cross_entropy(output, labels)

    micro = micro if step > 1 else 1
    return train(model, optimizer, shares(batches, first, step), loss, micro=micro)


# ---- other loops ---------------------------------------------------------------------------------


def of_words():
    torch.manual_seed(3)
    layers = nn.LayerNorm(8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5)
    return nn.Sequential(nn.Embedding(11, 8), *layers).double()


def padded(model, optimizer, first, step):
    """Padding and loss terms differ between ranks; once (a refresh) the second has none."""
    generator, decisions = torch.Generator().manual_seed(9), []
    for number in range(STEPS):
        words = torch.randint(11, (SIZE, 4), generator=generator)
        keep = torch.rand(SIZE, 4, generator=generator) < 0.6
        if number == 3:
            keep[1::2] = False
        keep[0, 0] ^= bool(keep.sum() % 2)
        # so that the average of the ranks is the mean over all
        terms = int(keep.sum()) // step
        words, keep = words[first::step], keep[first::step]
        optimizer.row_mask, optimizer.loss_terms = keep, terms
        losses = F.cross_entropy(model(words).flatten(0, 1), words.flatten() % 5, reduction="none")
        ((losses * keep.flatten()).sum() / terms).backward()
        optimizer.step()
        decisions.append({event.layer: event.decision for event in optimizer.last_refresh})
        optimizer.zero_grad()
    return decisions


def asked_for(model, optimizer, first, step):
    """torch.distributed.checkpoint takes a step to make the state; one rank alone may ask."""
    if first == 0 and step > 1:
        get_optimizer_state_dict(model.module, optimizer)
        assert optimizer.param_groups[0]["step"] == 0
    return train(model, optimizer, shares(stream(4), first, step))


# ---- all of them ---------------------------------------------------------------------------------

STATIC = {"static_graph": True, "gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
INNER = {**EVERY_OTHER, "count": 5}
AVERAGE = {"factor_decay": 0.3, "split_dim": 3, "micro": 3, "count": 8}
SAMPLED = {"fisher": "sampled", "count": 5}  # the pass of sampled labels averages no gradient
# of a softmax's gradient one direction is rounding alone, which polar factors raise to some 1e-9
MUON = {"method": ThorMuon, "damping": 0.1, "count": 8, "rtol": 1e-6, "atol": 1e-8}
ON_FOUR_TOO = {
    "plain": {},
    "static graph": {"ddp": STATIC},
    "accumulation": {"micro": 3},
    "unused allowed": {"ddp": UNUSED, "nesterov": True, "weight_decay": 0.1},
    "whole factors, clipped": {"split_dim": None, "kl_clip": 1e-3, "factor_decay": 0.6},
    "ThorMuon": MUON,
    "every step": {**EVERY_OTHER, "update_interval": 1, "count": 6},
    "experts": {"make": routed, **EVERY_OTHER, "count": 6},
    "inner layers": {"make": functools.partial(routed, inner=True), **INNER},
    "inner layers, frozen, accumulation": {"make": frozen_inside, **INNER, "micro": 3},
    "checkpointed": {"make": functools.partial(Checkpointed, False), "ddp": STATIC},
    "checkpointed, reentrant": {"make": functools.partial(Checkpointed, True), "ddp": STATIC},
    "sampled": SAMPLED,
    "sampled, accumulation": {**SAMPLED, "micro": 3},
    "uneven": {"go": uneven},
    # some experts have no rows in a refresh, and keep their factors; some have never had any
    "experts, average": {"make": routed, **AVERAGE},
    "a third optimizer": {"method": NaturalSGD, "count": 7},
}
CASES = ON_FOUR_TOO | {
    "anytime": {**MUON, "anytime": True},
    "padded": {"go": padded, "make": of_words},
    "asked for": {"go": asked_for},
    "compile, then DDP": {"count": 7, "ddp": lambda model: DDP(compiled(model))},
    "DDP, then compile": {"count": 7, "ddp": lambda model: compiled(DDP(model))},
}


def compiled(model):
    return torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)


graphs = []  # that are compiled in this process


def ranks_and_one(rank, world, name):
    options = dict(CASES[name])
    go = options.pop("go", None)
    if go is None:
        count, micro = options.pop("count", STEPS), options.pop("micro", 1)
        go = functools.partial(ordinarily, count=count, micro=micro)
    graphs.clear()
    decisions, bits = as_one_process(rank, world, go, **options)
    assert bool(graphs) == ("compile" in name)
    return decisions, bits


# those that take longest, beside which others of their kind are fast
SLOW = (
    "experts, average", "checkpointed, reentrant", "unused allowed", "static graph", "every step",
    "inner layers, frozen, accumulation", "compile, then DDP",
)  # fmt: skip


@pytest.mark.parametrize("name", marked(CASES, SLOW))
def test_equals_one_process_on_the_joined_batch(run, name):
    for world in (2, 4) if name in ON_FOUR_TOO else (2,):
        decisions, digests = zip(*run(world, ranks_and_one, name), strict=True)
        assert len(set(digests)) == 1, "the ranks differ in some bit"
        if name == "plain":
            kinds = {kind for step in decisions[0] for kind in step.values()}
            assert kinds == {"UPDATE", "KEEP", "STOP"}


def uneven_means(rank, world):
    """DDP averages the ranks' means; the statistics know how many terms each had."""
    (model, optimizer), (twin, other) = made("ddp", lr=0.0), alone(lr=0.0)
    train(model, optimizer, [part(batch, slice(3 * rank, 3 + 9 * rank)) for batch in stream(1)])
    train(twin, other, stream(1))
    for name, layer in optimizer.curvature.items():
        wanted = other.curvature[name]
        assert layer.rows_per_term == wanted.rows_per_term
        torch.testing.assert_close(layer.factors(), wanted.factors(), rtol=1e-10, atol=1e-13)
    assert optimizer.param_groups[0]["last_loss_terms"] == SIZE


def test_factors_of_uneven_batches(run):
    run(2, uneven_means)


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


def test_sums_of_losses(run):
    run(2, summed)


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


def labels_of(rank, world):
    """What each rank draws from the same predictions, in two refreshes."""
    model, optimizer = made("ddp", fisher="sampled", update_interval=1, lr=0.0)
    drawn = []

    class Recorded(Categorical):
        def sample(self, sample_shape=()):
            drawn.append(super().sample(sample_shape).tolist())
            return torch.tensor(drawn[-1])

    def loss(output, labels):
        optimizer.sample_fisher(output, lambda logits: Recorded(logits=logits))
        return F.cross_entropy(output, labels)

    train(model, optimizer, stream(2), loss)
    return drawn


def test_every_rank_draws_labels_of_its_own(run):
    one, other = run(2, labels_of)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert run(2, labels_of) == [one, other]
