"""The trace rule on data made by hand. When a refresh is due: tests/test_intervals.py."""

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, train, twins, weights
from torch_thor import THOR

# options of THOR, and of steps: A, A in use after it, Δ. The borders of the rule are in
# tests/curvature/test_refresh_rule.py.
STORIES = [
    ({"trace_thresholds": (1e9, 1e8)}, [(3.0, 3.0, None)]),  # the first refresh always takes
    # 1 → 1.01 (kept) → 1.02: 0.0133 from the factors in use, but 0.0066 from those seen last
    ({}, [(1.0, 1.0, None), (1.01, 1.0, 0.01 / 1.5), (1.02, 1.02, 0.02 / 1.5)]),
    (
        {"trace_thresholds": (0.0, 0.0)},
        [(1.0, 1.0, None), (1.0, 1.0, 0.0), (1.000001, 1.000001, 1e-6 / 1.5)],
    ),
    # it falls as it rises; a layer that has stopped never takes factors again
    ({}, [(1.0, 1.0, None), (0.9851, 1.0, 0.0149 / 1.5), (0.9849, 0.9849, 0.0151 / 1.5)]),
    (
        {"trace_thresholds": (0.01, 0.001)},
        [(1.0, 1.0, None), (1.0, 1.0, 0.0), (50.0, 1.0, 0.0), (900.0, 1.0, 0.0)],
    ),
    # β = 0.25: 4, then 0.25 · 4 + 0.75 · 8 = 7; a kept refresh adds nothing
    (
        {"factor_decay": 0.25},
        [(4.0, 4.0, None), (8.0, 7.0, 4 / 4.5), (7.0, 7.0, 0.0), (11.0, 10.0, 4 / 7.5)],
    ),
]


@pytest.mark.parametrize(("options", "story"), STORIES)
def test_refreshes_of_a_weight_whose_factors_are_numbers(options, story):
    """The input √a and the gradient 1: A = a, G = 1 and tr(F + λI) = a + 0.5, at first 1.5."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    optimizer = THOR(model, lr=0.0, damping=0.5, update_interval=1, **options)
    layer = optimizer.curvature["0"]
    for a, in_use, change in story:
        model(torch.tensor([[a**0.5]], dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert layer.factors()[0].item() == pytest.approx(in_use)
        # damping comes after the average
        assert layer.inverses()[0].item() == pytest.approx(1 / (in_use + 0.5**0.5))
        assert layer.last_trace_change == pytest.approx(change, abs=1e-12)


def test_looking_changes_nothing():
    """`factors()` and `inverses()` are copies, and there are none before a refresh."""
    model, optimizer, twin, other = twins(THOR)
    for curvature in optimizer.curvature.values():
        assert curvature.last_trace_change is None
        for look in (curvature.factors, curvature.inverses):
            with pytest.raises(RuntimeError, match="no factors"):
                look()
    stream = batches(3)
    train(model, optimizer, stream[:1])
    for curvature in optimizer.curvature.values():
        for tensor in (*curvature.factors(), *curvature.inverses()):
            tensor.fill_(1e6)
    train(model, optimizer, stream[1:])
    train(twin, other, stream)
    assert_same(weights(model), weights(twin))
