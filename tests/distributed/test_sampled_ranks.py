"""Sampled labels: every rank draws its own, and all must draw some. That ranks equal one process is told elsewhere."""

import pytest
import torch
from torch.distributions import Categorical
from torch.nn import functional as F

from joined import made, shares, stream, train


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


def without_labels(rank, world, ranks, message):
    """The given ranks have no sampled labels."""
    model, optimizer = made("ddp", fisher="sampled")
    ((inputs, labels),) = shares(stream(1), rank, world)
    logits = model(inputs)
    if rank not in ranks:
        optimizer.sample_fisher(logits)
    F.cross_entropy(logits, labels).backward()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


def test_no_labels_on_one_rank_or_on_any_is_an_error_on_all(run):
    run(2, without_labels, (0, 1), r"call optimizer.sample_fisher\(output\)")
    run(2, without_labels, (1,), "sampled labels: yes.*sampled labels: no")
