"""`THOR(model)` and `ThorMuon(model)`, no other word, train what people bring.

The bar is low on purpose: after twelve steps (five of the largest models) the loss is below 0.9 of
the first step's, or as low as AdamW(1e-3) brings it from the same weights, on the same data. The
loss is the median of the last three, because EfficientNet's, with batch normalisation over few
examples, doubles or halves from one step to the next. Its five steps went either way with the last
bits of a sum, so it takes twelve.
"""

import functools
import math
import re
import statistics
import warnings

import pytest
import torch

import zoo
from torch_thor import THOR, ThorMuon

METHODS = {"plain": THOR, "spectral": ThorMuon}
OPTIONS = {("vae", "plain"): {"loss_reduction": "sum"}}  # its loss is a sum
# half a second a step of products and eigendecompositions
SLOW = {"resnet18", "efficientnet", "nf_resnet26", "mobilenet_v3", "convnext"}
FEW_STEPS = {"resnet18", "nf_resnet26"}
FRESH = ("mnist", "vae", "bert", "gpt2", "t5")

UNCALLED = r"layers? {}: it has a gradient and no statistics"  # weights without calls
# one message for all of them
MAMBA = {UNCALLED.format(r"'backbone\.layers\.0\.mixer\.conv1d'.*mixer\.dt_proj'.*")}
# All that THOR has to say about these models; each message once, and of each of them the line of
# the user's step.
WARNINGS = {
    ("mamba", "plain"): MAMBA,
    ("mamba", "spectral"): MAMBA,
    # an embedding is no matrix with two full factors: the scale-free step never waits for its
    # statistics
    ("deberta_v2", "plain"): {UNCALLED.format(r"'deberta\.encoder\.rel_embeddings'")},
}


def cases(names):
    """Models and settings."""
    return [
        pytest.param(name, setting, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in names
        for setting in METHODS
    ]


@functools.cache
def losses_of_adamw(name, seed, steps, fresh):
    with warnings.catch_warnings(action="ignore"):
        subject = zoo.build(name, seed)
        optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-3)
        return zoo.train(subject, optimizer, steps, seed, fresh=fresh)


def losses_of_thor(name, seed, setting, steps, fresh):
    """Train; return the losses. Parameters are finite, and THOR's warnings are those of the
    table.
    """
    with warnings.catch_warnings(record=True, action="always") as caught:
        subject = zoo.build(name, seed)
        optimizer = METHODS[setting](subject.model, **OPTIONS.get((name, setting), {}))
        losses = zoo.train(subject, optimizer, steps, seed, fresh=fresh)
    said = [
        w for w in caught if "torch_thor" in w.filename or str(w.message).lower().startswith("thor")
    ]
    wanted = WARNINGS.get((name, setting), set())
    unexpected = [
        str(w.message)
        for w in said
        if not any(re.search(pattern, str(w.message)) for pattern in wanted)
    ]
    assert not unexpected
    for pattern in wanted:
        assert sum(re.search(pattern, str(w.message)) is not None for w in said) == 1, pattern
    assert {w.filename for w in said} <= {zoo.__file__}
    assert all(bool(p.isfinite().all()) for p in subject.model.parameters())
    assert all(map(math.isfinite, losses))
    return losses


@pytest.mark.parametrize(("name", "setting"), cases(zoo.SUBJECTS))
def test_the_defaults_train(name, setting):
    steps = 5 if name in FEW_STEPS else 12
    losses = losses_of_thor(name, 0, setting, steps=steps, fresh=False)
    last = statistics.median(losses[-3:])
    assert last < 0.9 * losses[0] or last <= statistics.median(
        losses_of_adamw(name, 0, steps, fresh=False)[-3:]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), cases(FRESH))
def test_the_defaults_train_on_fresh_batches(name, setting):
    # how hard a batch is differs, so the mean of the last eight counts, none of which was seen
    # before
    last = sum(losses_of_thor(name, 0, setting, steps=24, fresh=True)[-8:]) / 8
    adamw = losses_of_adamw(name, 0, 24, fresh=True)
    assert last < 0.9 * adamw[0] or last <= sum(adamw[-8:]) / 8


@pytest.mark.parametrize("name", zoo.SUBJECTS)
def test_nearly_all_of_each_model_is_preconditioned(name):
    # what is left: biases of position, gates and state matrices that are no layer's weight;
    # embeddings in spectral
    for setting, least in (("plain", 0.9), ("spectral", 0.8)):
        entries = [e for e in METHODS[setting](zoo.build(name).model).coverage() if e.trained]
        covered = sum(math.prod(e.shape) for e in entries if e.preconditioned)
        assert covered >= least * sum(math.prod(e.shape) for e in entries), setting


@pytest.mark.parametrize("name", zoo.SUBJECTS)
def test_the_number_of_loss_terms_is_that_of_the_batch(name):
    # convolutions, windows, position embeddings and encoders beside decoders: the samples are what
    # all of them have
    subject = zoo.build(name)
    optimizer = THOR(subject.model)
    with warnings.catch_warnings(action="ignore"):
        subject.loss().backward()
        optimizer.step()
    assert [group["last_loss_terms"] for group in optimizer.param_groups] == [
        len(subject.batches[0][0])
    ]
