"""DDP on 2 and 4 ranks takes the steps of one process on the joined batch, in float64."""

import functools

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from joined import (
    SIZE,
    Checkpointed,
    as_one_process,
    assert_same_training,
    digest,
    made,
    marked,
    part,
    routed,
    shares,
    single,
    stream,
    train,
    uneven,
)
from third_optimizer import NaturalSGD
from torch_thor import ThorMuon

STEPS = 14


class LeastLikely(Categorical):
    """Its label does not depend on the rank."""

    def sample(self, sample_shape=()):
        return self.logits.argmin(-1)


def ordinarily(model, optimizer, first, step, count, micro):
    batches = list(stream(count))
    for (_, words), _ in batches:  # only the first example has rows for expert 4
        words[0, 0] = 4
        words[1:] -= (words[1:] % 5 == 4).long()

    def loss(output, labels):
        if optimizer.fisher == "sampled":
            optimizer.sample_fisher(output, lambda logits: LeastLikely(logits=logits))
        return F.cross_entropy(output, labels)

    micro = micro if step > 1 else 1
    return train(model, optimizer, shares(batches, first, step), loss, micro=micro)


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


# polar factors raise a direction of a softmax's gradient that is only rounding to some 1e-9
MUON = {"method": ThorMuon, "damping": 0.1, "count": 8, "rtol": 1e-6, "atol": 1e-8}
UNUSED = {"find_unused_parameters": True}
ON_FOUR_TOO = {
    "plain": {},
    "accumulation": {"micro": 3},
    "unused allowed": {"ddp": UNUSED, "nesterov": True, "weight_decay": 0.1},
    "whole factors, clipped": {"split_dim": None, "kl_clip": 1e-3, "factor_decay": 0.6},
    "ThorMuon": MUON,
    "checkpointed": {"make": Checkpointed, "ddp": {"static_graph": True}},
    "sampled": {"fisher": "sampled", "count": 5, "micro": 3},
    "uneven": {"go": uneven},
    # some experts have no rows in a refresh, and keep their factors; some have never had any
    "inner layers": {"make": routed, "factor_decay": 0.3, "split_dim": 3, "micro": 3, "count": 8},
    "a third optimizer": {"method": NaturalSGD, "count": 7},
}
CASES = ON_FOUR_TOO | {
    "anytime": {**MUON, "anytime": True},
    "padded": {"go": padded, "make": of_words},
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


@pytest.mark.parametrize("name", marked(CASES, slow=("unused allowed", "compile, then DDP")))
def test_equals_one_process_on_the_joined_batch(run, name):
    for world in (2, 4) if name in ON_FOUR_TOO else (2,):
        decisions, digests = zip(*run(world, ranks_and_one, name), strict=True)
        assert len(set(digests)) == 1, "the ranks differ in some bit"
        if name == "plain":
            kinds = {kind for step in decisions[0] for kind in step.values()}
            assert kinds == {"UPDATE", "KEEP", "STOP"}


def uneven_means(rank, world):
    """DDP averages the ranks' means; the statistics know how many terms each rank had."""
    (model, optimizer), (twin, other) = made("ddp", lr=0.0), single(lr=0.0)
    train(model, optimizer, [part(batch, slice(3 * rank, 3 + 9 * rank)) for batch in stream(1)])
    train(twin, other, stream(1))
    for name, layer in optimizer.curvature.items():
        wanted = other.curvature[name]
        assert layer.rows_per_term == wanted.rows_per_term
        torch.testing.assert_close(layer.factors(), wanted.factors(), rtol=1e-10, atol=1e-13)
    assert optimizer.param_groups[0]["last_loss_terms"] == SIZE


def test_factors_of_uneven_batches(run):
    run(2, uneven_means)


def pairs_of_ranks(rank, world):
    """Two trainings of two ranks each, given their own groups."""
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    batches = list(stream(STEPS + rank // 2))[-STEPS:]
    model, optimizer = made("ddp", ddp={"process_group": mine}, distributed={"process_group": mine})
    decisions = train(model, optimizer, shares(batches, rank % 2, 2))
    twin, other = single()
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
    first, second = run(2, labels_of)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert run(2, labels_of) == [first, second]
