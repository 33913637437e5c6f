"""`THOR(model)` and `ThorMuon(model)`, without options, train what people bring.

The bar is low on purpose: after twelve steps (five of the largest models) the loss is below 0.9 of
the first step's, or as low as AdamW(1e-3) brings it from the same weights, on the same data. The
loss is the median of the last three, because EfficientNet's, with batch normalisation over few
examples, doubles or halves from one step to the next.
"""

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
SLOW = {"resnet18", "efficientnet", "nf_resnet26", "convnext"}
FEW_STEPS = {"resnet18", "nf_resnet26"}

UNCALLED = r"layers? {}: it has a gradient and no statistics"  # weights without calls
# a single message for all layers
MAMBA = {UNCALLED.format(r"'backbone\.layers\.0\.mixer\.conv1d'.*mixer\.dt_proj'.*")}
# All warnings of THOR about these models, each once
WARNINGS = {
    ("mamba", "plain"): MAMBA,
    ("mamba", "spectral"): MAMBA,
    # an embedding is no matrix with two full factors: the scale-free step never waits for its
    # statistics
    ("deberta_v2", "plain"): {UNCALLED.format(r"'deberta\.encoder\.rel_embeddings'")},
}


def losses_of_adamw(name, steps):
    with warnings.catch_warnings(action="ignore"):
        subject = zoo.build(name)
        optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-3)
        return zoo.train(subject, optimizer, steps)


def losses_of_thor(name, setting, steps):
    """The losses; parameters are finite, and the table has all warnings of THOR."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        subject = zoo.build(name)
        optimizer = METHODS[setting](subject.model, **OPTIONS.get((name, setting), {}))
        losses = zoo.train(subject, optimizer, steps)
    told = [str(w.message) for w in caught if w.filename == zoo.__file__]
    told = [message for message in told if message.lower().startswith("thor")]
    wanted = WARNINGS.get((name, setting), set())
    assert len(told) == len(wanted)
    assert all(any(re.search(pattern, message) for message in told) for pattern in wanted)
    assert not [w.message for w in caught if "torch_thor" in w.filename]
    assert all(bool(p.isfinite().all()) for p in subject.model.parameters())
    assert all(map(math.isfinite, losses))
    return losses


@pytest.mark.parametrize("setting", METHODS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in zoo.SUBJECTS],
)
def test_the_defaults_train(name, setting):
    steps = 5 if name in FEW_STEPS else 12
    losses = losses_of_thor(name, setting, steps)
    last = statistics.median(losses[-3:])
    assert last < 0.9 * losses[0] or last <= statistics.median(losses_of_adamw(name, steps)[-3:])


@pytest.mark.parametrize("name", zoo.SUBJECTS)
def test_nearly_all_is_preconditioned_and_the_batch_is_the_number_of_loss_terms(name):
    # what is left: biases of position, gates and state matrices that are no layer's weight;
    # embeddings in spectral
    subject = zoo.build(name)
    for setting, least in (("plain", 0.9), ("spectral", 0.8)):
        optimizer = METHODS[setting](subject.model)
        entries = [entry for entry in optimizer.coverage() if entry.trained]
        covered = sum(math.prod(entry.shape) for entry in entries if entry.preconditioned)
        assert covered >= least * sum(math.prod(entry.shape) for entry in entries), setting
    # windows, positions and decoders have other leading dimensions than the samples
    optimizer = THOR(subject.model)
    with warnings.catch_warnings(action="ignore"):
        subject.loss().backward()
        optimizer.step()
    assert optimizer.param_groups[0]["last_loss_terms"] == subject.samples
