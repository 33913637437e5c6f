"""Sampled labels under DDP: the pass averages no gradient, every rank draws its own labels, statistics are pooled."""

import contextlib
import functools

import pytest
import torch
from torch.distributions import Categorical
from torch.nn import functional as F

from joined import as_one_process, made, part, shares, stream


class Fixed(Categorical):
    """A prediction whose label is the least likely class, whichever rank has it."""

    def sample(self, sample_shape=()):
        return self.logits.argmin(-1)


def fixed(logits):
    return Fixed(logits=logits)


def sampling(model, optimizer, first, step, micro=1, distribution=fixed, count=5):
    decisions = []
    for batch in shares(stream(count), first, step):
        for i in range(micro):
            inputs, labels = part(batch, slice(i, None, micro))
            later = getattr(model, "no_sync", contextlib.nullcontext) if i < micro - 1 else contextlib.nullcontext
            with later():
                logits = model(inputs)
                optimizer.sample_fisher(logits, distribution)
                (F.cross_entropy(logits, labels) / micro).backward()
        optimizer.step()
        decisions.append({event.layer: event.decision for event in optimizer.last_refresh})
        optimizer.zero_grad()
    return decisions


CASES = {
    "plain": {},
    "static graph": {"ddp": {"static_graph": True}},
    "unused allowed": {"ddp": {"find_unused_parameters": True}},
    "accumulation": {"micro": 3},
}


def go_on(model, optimizer, first, step, micro):
    return sampling(model, optimizer, first, step, micro if step > 1 else 1)


def both(rank, world, micro=1, **options):
    return as_one_process(rank, world, functools.partial(go_on, micro=micro), fisher="sampled", **options)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_on_the_joined_batch(run, name):
    one, other = run(2, functools.partial(both, **CASES[name]))
    assert one == other, "the ranks differ in some bit"


def labels_of(rank, world):
    """What each rank draws from the same predictions, in two refreshes."""
    model, optimizer = made("ddp", fisher="sampled", update_interval=1, lr=0.0)
    drawn = []

    class Recorded(Categorical):
        def sample(self, sample_shape=()):
            drawn.append(super().sample(sample_shape).tolist())
            return torch.tensor(drawn[-1])

    sampling(model, optimizer, 0, 1, distribution=lambda logits: Recorded(logits=logits), count=2)
    return drawn


def test_every_rank_draws_labels_of_its_own(run):
    one, other = run(2, labels_of)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert run(2, labels_of) == [one, other]


def without_labels(rank, world, ranks, message):
    """The given ranks have no sampled labels."""
    model, optimizer = made("ddp", fisher="sampled")
    ((inputs, labels),) = shares(stream(1), rank, world)
    logits = model(inputs)
    if rank not in ranks:
        optimizer.sample_fisher(logits, fixed)
    F.cross_entropy(logits, labels).backward()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


def test_no_labels_on_one_rank_or_on_any_is_an_error_on_all(run):
    run(2, without_labels, (0, 1), r"call optimizer.sample_fisher\(output\)")
    run(2, without_labels, (1,), "sampled labels: yes.*sampled labels: no")
