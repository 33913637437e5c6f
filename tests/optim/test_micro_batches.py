"""Micro-batches of a model with layers of every kind train it as the whole batch does."""

import pytest
import torch
from test_sampled_fisher import fixed

from comparing import having
from every_kind import build, stream
from tiny import cross_entropy, weights
from torch_thor import THOR, ThorMuon

STREAM = stream()
OPTIONS = {"lr": 0.02, "damping": 0.1, "split_dim": 3, "update_interval": 2}

pytestmark = pytest.mark.filterwarnings(
    "ignore:THOR.*:RuntimeWarning", "ignore:Thor.*:RuntimeWarning"
)


def trained(cuts, make, *, least_likely, **options):
    """After micro-batches that end at these samples; all forward passes come first."""
    model = build().double()
    optimizer = having(make(model, **OPTIONS, **options), loss_terms=STREAM[0][1].numel())
    for x, labels in STREAM:
        losses = []
        for start, stop in zip((0, *cuts), (*cuts, len(x)), strict=True):
            output, wanted = model(x[start:stop]), labels[start:stop]
            if least_likely:
                wanted = fixed(output).sample()
            if options.get("fisher") == "sampled":
                optimizer.sample_fisher(output, fixed)
            losses.append(cross_entropy(wanted)(output) * (stop - start) / len(x))
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("method", ["empirical", "sampled", "muon"])
def test_micro_batches_equal_one_batch(method):
    """Sampled labels that are the training's equal the training's too: rows count once."""
    muon, least_likely = method == "muon", method == "sampled"
    make, options = (ThorMuon, {}) if muon else (THOR, {"trace_thresholds": (0.0, 0.0)})
    fisher = {"fisher": "sampled"} if least_likely else {}
    model, optimizer = trained((1, 2), make, least_likely=least_likely, **options, **fisher)
    twin, other = trained((), make, least_likely=least_likely, **options)
    # the orthogonalisation turns a direction that is lost in rounding (of a softmax's gradient)
    # into 1e-9
    rtol, atol = (1e-7, 1e-8) if muon else (1e-9, 1e-12)
    torch.testing.assert_close(weights(model), weights(twin), rtol=rtol, atol=atol)
    found, expected = (
        [(layer.refreshes, layer.rows_per_term) for layer in each.curvature.values()]
        for each in (optimizer, other)
    )
    torch.testing.assert_close(found, expected)
    assert muon or {refreshes for refreshes, _ in found} == {3}
