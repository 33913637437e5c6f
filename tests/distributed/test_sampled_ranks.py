"""Sampled labels under DDP: the pass averages no gradient, every rank draws its own labels, statistics are pooled."""

import contextlib

import pytest
import torch
from torch.distributions import Categorical
from torch.nn import functional as F

from joined import alone, assert_same_training, digest, parallel, part, share, stream

STEPS = 5


class Fixed(Categorical):
    """A prediction whose label is the least likely class, whichever rank has it."""

    def sample(self, sample_shape=()):
        return self.logits.argmin(-1)


def train(model, optimizer, batches, distribution, micro=1):
    decisions = []
    for batch in batches:
        for i in range(micro):
            inputs, labels = part(batch, slice(i, None, micro))
            later = getattr(model, "no_sync", contextlib.nullcontext) if i < micro - 1 else contextlib.nullcontext
            with later():
                logits = model(inputs)
                optimizer.sample_fisher(logits, distribution)
                (F.cross_entropy(logits, labels) / micro).backward()
        optimizer.step()
        decisions.append({event.layer: event for event in optimizer.last_refresh})
        optimizer.zero_grad()
    return decisions


def fixed(logits):
    return Fixed(logits=logits)


def both_ways(rank, world, ddp, micro, options):
    options = {"fisher": "sampled", **options}
    batches = list(stream(STEPS))
    model, optimizer = parallel(rank, world, ddp=ddp, **options)
    decisions = train(model, optimizer, [share(b, rank, world) for b in batches], fixed, micro)
    twin, its_optimizer = alone(**options)
    wanted = train(twin, its_optimizer, batches, fixed)
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, wanted))
    return digest(model, optimizer)


CASES = {
    "plain": ({}, 1, {}),
    "static-graph": ({"static_graph": True}, 1, {}),
    "unused-allowed": ({"find_unused_parameters": True}, 1, {}),
    "accumulation": ({}, 3, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_on_the_joined_batch(run, name):
    assert len(set(run(2, both_ways, *CASES[name]))) == 1, "the ranks differ in some bit"


def labels_of(rank, world):
    """What each rank draws from the same predictions, in two refreshes."""
    model, optimizer = parallel(rank, world, fisher="sampled", update_interval=1, lr=0.0)
    drawn = []

    class Recorded(Categorical):
        def sample(self, sample_shape=()):
            drawn.append(super().sample(sample_shape).tolist())
            return torch.tensor(drawn[-1])

    train(model, optimizer, list(stream(2)), lambda logits: Recorded(logits=logits))
    return drawn


def test_every_rank_draws_labels_of_its_own(run):
    one, other = run(2, labels_of)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert run(2, labels_of) == [one, other]


def no_call(rank, world, everywhere):
    """One rank, or both, have no sampled labels."""
    model, optimizer = parallel(rank, world, fisher="sampled")
    inputs, labels = share(next(stream(1)), rank, world)
    logits = model(inputs)
    if rank == 0 and not everywhere:
        optimizer.sample_fisher(logits, fixed)
    F.cross_entropy(logits, labels).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_no_labels_on_any_rank_is_an_error_on_all(run):
    for message in run(2, no_call, True):
        assert "call optimizer.sample_fisher(output)" in message


def test_no_labels_on_one_rank_is_an_error_on_all(run):
    for message in run(2, no_call, False):
        assert "sampled labels: yes" in message
        assert "sampled labels: no" in message


def differing(rank, world):
    model, optimizer = parallel(rank, world, fisher="sampled" if rank == 0 else "empirical")
    inputs, labels = share(next(stream(1)), rank, world)
    logits = model(inputs)
    if rank == 0:
        optimizer.sample_fisher(logits, fixed)
    F.cross_entropy(logits, labels).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_that_differ_in_the_fisher_are_told(run):
    for message in run(2, differing):
        assert "fisher='sampled'" in message
        assert "fisher='empirical'" in message
