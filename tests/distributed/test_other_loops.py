"""Loops that are not the ordinary one: there too DDP takes the steps of one process on the joined batch."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradient
from torch.nn import functional as F

from joined import SIZE, Rows, alone, as_one_process, made, part, shares, stream, sum_over, train

STEPS = 14


def with_scaler(model, optimizer, first, step):
    """A GradScaler on every rank; on one of them inf, in a refresh, which all skip as one process does."""
    scaler, decisions = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2), []
    for number, (inputs, labels) in enumerate(shares(stream(8), first, step)):
        blow_up = number == 3 and first == 0
        scaler.scale(F.cross_entropy(model(inputs), labels) * (torch.inf if blow_up else 1.0)).backward()
        if number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        decisions.append({event.layer: event.decision for event in optimizer.last_refresh})
        optimizer.zero_grad()
    assert not decisions[3]
    assert optimizer.param_groups[0]["step"] == 7
    assert scaler.get_scale() != 2.0**10
    return decisions


def uneven(model, optimizer, first, step):
    """3 and 9 examples, in sums over a rank's share of the joined batch, which is then what its loss averages over."""
    optimizer.loss_terms = SIZE // step
    cut = (slice(0, 3), slice(3, SIZE))[first] if step > 1 else slice(None)
    return train(model, optimizer, [part(batch, cut) for batch in stream(STEPS)], loss=sum_over(SIZE // step))


def uneven_means(rank, world):
    """DDP averages the ranks' means; the statistics know how many terms each had."""
    (model, optimizer), (twin, other) = made("ddp", lr=0.0), alone(lr=0.0)
    train(model, optimizer, [part(batch, slice(3 * rank, 3 + 9 * rank)) for batch in stream(1)])
    train(twin, other, stream(1))
    for name, layer in optimizer.curvature.items():
        assert layer.rows_per_term == other.curvature[name].rows_per_term
        torch.testing.assert_close(layer.factors(), other.curvature[name].factors(), rtol=1e-10, atol=1e-13)
    assert optimizer.param_groups[0]["last_loss_terms"] == SIZE


def test_factors_of_uneven_batches(run):
    run(2, uneven_means)


def without_examples(model, optimizer, first, step):
    """The second rank has no examples in two of three refreshes."""
    optimizer.loss_terms = SIZE // step
    batches = list(stream(10))
    own = shares(batches, first, step)
    for empty in (0, 6):
        own[empty] = part(batches[empty], slice(0, 0) if first else slice(None))
    return train(model, optimizer, own, loss=sum_over(SIZE // step))


def of_words():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def padded(model, optimizer, first, step):
    """Rows of padding and loss terms of one's own, other ones on each rank, once (a refresh) none on the second."""
    generator, decisions = torch.Generator().manual_seed(9), []
    for number in range(STEPS):
        words = torch.randint(11, (SIZE, 4), generator=generator)
        keep = torch.rand(SIZE, 4, generator=generator) < 0.6
        if number == 3:
            keep[1::2] = False
        keep[0, 0] ^= bool(keep.sum() % 2)
        # a rank's sum is divided by its share of all terms, so that the average of the ranks is the mean over all
        terms = int(keep.sum()) // step
        words, keep = words[first::step], keep[first::step]
        optimizer.row_mask, optimizer.loss_terms = keep, terms
        losses = F.cross_entropy(model(words).flatten(0, 1), words.flatten() % 5, reduction="none")
        ((losses * keep.flatten()).sum() / terms).backward()
        optimizer.step()
        decisions.append({event.layer: event.decision for event in optimizer.last_refresh})
        optimizer.zero_grad()
    return decisions


class JoinedNorm(nn.Module):
    """What nn.SyncBatchNorm does, which runs on GPUs only: mean and variance of all ranks, gradients through both."""

    alone = False

    def forward(self, x):
        sums = torch.stack([x.sum(0), x.square().sum(0), torch.ones_like(x).sum(0)])
        total, squares, count = sums if self.alone else all_reduce_with_gradient(sums)
        mean = total / count
        return (x - mean) * (squares / count - mean.square() + 1e-5).rsqrt()


def normed():
    torch.manual_seed(3)
    layers = nn.Linear(8, 6), JoinedNorm(), nn.Tanh(), nn.Linear(6, 6), JoinedNorm(), nn.Linear(6, 5)
    return nn.Sequential(Rows(), *layers).double()


def with_norms(model, optimizer, first, step):
    for module in model.modules():
        module.alone = step == 1
    return train(model, optimizer, shares(stream(7), first, step))


def asked_for(model, optimizer, first, step):
    """torch.distributed.checkpoint takes a step to make the state; one rank alone may ask."""
    if first == 0 and step > 1:
        get_optimizer_state_dict(model.module, optimizer)
        assert optimizer.param_groups[0]["step"] == 0
    return train(model, optimizer, shares(stream(4), first, step))


def skipping(model, optimizer, first, step):
    """NaN on one rank with nonfinite="skip": through DDP on all of them, and by hand on one alone.

    First in a step that would refresh, then in an ordinary one.
    """
    batches, decisions = shares(stream(5), first, step), []
    for ordinary in (False, True):
        for by_hand in (False, True) if step > 1 else ():
            loss = F.cross_entropy(model(batches[4][0]), batches[4][1])
            (loss * (torch.nan if first and not by_hand else 1.0)).backward()
            if by_hand and first:
                model.module.head.bias.grad[0] = torch.inf
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.skipped_steps == (2 * (1 + ordinary) if step > 1 else 0)
        decisions += train(model, optimizer, batches[2:4] if ordinary else batches[:2])
    return decisions


LOOPS = {
    with_scaler: {},
    uneven: {},
    without_examples: {},
    padded: {"make": of_words},
    with_norms: {"make": normed},
    asked_for: {},
    skipping: {"nonfinite": "skip"},
}


@pytest.mark.parametrize("go", LOOPS)
def test_other_loops(run, go):
    one, other = run(2, functools.partial(as_one_process, go=go, **LOOPS[go]))
    assert one == other
