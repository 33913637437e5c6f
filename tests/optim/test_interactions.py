"""Layers of all kinds, under what else happens to a training: two things at a time."""

import pytest
import torch
from test_sampled_fisher import fixed
from torch import nn

from comparing import having
from every_kind import build, stream
from tiny import cross_entropy, weights
from torch_thor import THOR, ThorMuon

STREAM = stream()
MUON = {"lr": 0.02, "damping": 0.1, "split_dim": 3, "update_interval": 2}
OPTIONS = {**MUON, "trace_thresholds": (0.0, 0.0)}
TERMS = STREAM[0][1].numel()

pytestmark = pytest.mark.filterwarnings(
    "ignore:THOR.*:RuntimeWarning", "ignore:Thor.*:RuntimeWarning"
)


class Bypass(nn.Module):
    """Uses the weight of a layer without calling it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x @ self.inner.weight + self.inner.bias


def freeze(model):
    """Experts whose biases are trained, a recurrent weight in the middle, and a convolution."""
    for frozen in (model.experts.weight, model.rnn.weight_hh_l0, model.standardised.weight):
        frozen.requires_grad_(False)


def bypass(model):
    model.head = Bypass(model.head)


# what becomes of the model, and how many of its layers then refresh
CHANGES = {"trained": (lambda model: None, 25), "frozen": (freeze, 22), "uncalled": (bypass, 24)}


def two(change="trained", optimizer=THOR, **options):
    """The same model twice, each with its optimizer."""
    made = []
    for _ in range(2):
        model = build().double()
        CHANGES[change][0](model)
        made.append((model, having(optimizer(model, **options), loss_terms=TERMS)))
    return made


def in_parts(model, optimizer, cuts, *, least_likely):
    """Micro-batches of unlike sizes: in some of them there is no token for an expert. All forward
    passes come first.
    """
    for x, labels in STREAM:
        losses = []
        for start, stop in zip((0, *cuts), (*cuts, len(x)), strict=True):
            output, wanted = model(x[start:stop]), labels[start:stop]
            if least_likely:
                wanted = fixed(output).sample()
            if not isinstance(optimizer, ThorMuon) and optimizer.fisher == "sampled":
                optimizer.sample_fisher(output, fixed)
            losses.append(cross_entropy(wanted)(output) * (stop - start) / len(x))
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["empirical", "sampled", "muon"])
def test_micro_batches_equal_one_batch(change, method):
    """And labels that are sampled, where they are the training's, equal the training's: rows count
    once.
    """
    muon, least_likely = method == "muon", method == "sampled"
    options = {"optimizer": ThorMuon, **MUON} if muon else OPTIONS
    (model, optimizer), (twin, other) = two(change, **options)
    if least_likely:
        _beside, optimizer = (
            optimizer,
            having(THOR(model, **OPTIONS, fisher="sampled"), loss_terms=TERMS),
        )
    in_parts(model, optimizer, (1, 2), least_likely=least_likely)
    in_parts(twin, other, (), least_likely=least_likely)
    # a direction that is lost in rounding (of a softmax's gradient) comes out of the
    # orthogonalisation as 1e-9
    rtol, atol = (1e-7, 1e-8) if muon else (1e-9, 1e-12)
    torch.testing.assert_close(weights(model), weights(twin), rtol=rtol, atol=atol)
    found, expected = (
        [(c.refreshes, c.rows_per_term) for c in one.curvature.values() if c.refreshes]
        for one in (optimizer, other)
    )
    torch.testing.assert_close(found, expected)
    assert len(found) == CHANGES[change][1] - 2 * muon  # ThorMuon has no diagonal factors
    assert muon or {refreshes for refreshes, _ in found} == {3}
