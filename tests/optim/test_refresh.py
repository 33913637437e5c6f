"""When a layer refreshes: the interval, and the trace rule on data made by hand."""

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, mlp, train, weights
from torch_thor import THOR

TAKE_ALL = {"trace_thresholds": (0.0, 0.0)}


class Scalar:
    """One weight, shown the input √`a` and the gradient √`g`: A = a, G = g and tr(F + λI) = ag + λ."""

    def __init__(self, **options):
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
        options = {"lr": 0.0, "damping": 0.5, "update_interval": 1, "momentum": 0.0, **options}
        self.optimizer = THOR(self.model, **options)
        self.curvature = self.optimizer.curvature["0"]

    def show(self, a, g=1.0):
        x = torch.tensor([[a**0.5]], dtype=torch.float64)
        (self.model(x) * g**0.5).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def a(self):
        return self.curvature.factors()[0].item()

    @property
    def a_inverse(self):
        return self.curvature.inverses()[0].item()


# ------------------------------------------------------------------------------------------- interval


def steps_that_refresh(interval, steps=12, change=None):
    """Which steps took new factors, seen from the outside: A changes with every new input."""
    layer = Scalar(update_interval=interval, **TAKE_ALL)
    taken = []
    for step in range(steps):
        if step == 2 and change is not None:
            layer.optimizer.param_groups[0]["update_interval"] = change
        layer.show(10.0 * (step + 1))
        if layer.a == pytest.approx(10.0 * (step + 1)):
            taken.append(step)
    assert layer.curvature.refreshes == len(taken)
    return taken


def test_steps_that_refresh():
    asked = []

    def longer(step):
        asked.append(step)
        return step + 2

    assert steps_that_refresh(1) == list(range(12))
    assert steps_that_refresh(3) == [0, 3, 6, 9]
    assert steps_that_refresh(100) == [0]
    assert steps_that_refresh(lambda step: 4) == [0, 4, 8]
    assert steps_that_refresh(lambda step: step + 1) == [0, 1, 3, 7]
    assert steps_that_refresh(lambda step: 1 if step < 3 else 5) == [0, 1, 2, 3, 8]
    assert steps_that_refresh(3, 9, change=2) == [0, 3, 5, 7]  # the group is asked at a refresh
    assert steps_that_refresh(longer) == [0, 2, 6]
    assert sorted(set(asked)) == [0, 2, 6]
    with pytest.raises(ValueError, match="0"):
        steps_that_refresh(lambda step: 0)


# ------------------------------------------------------------------------------------------ trace rule
# λ = 0.5 throughout: the first trace is 1.5. The borders of the rule are in tests/curvature/test_refresh_rule.py


def test_stories():
    """Of steps: A, A in use after it, Δ."""
    stories = [
        ({"trace_thresholds": (1e9, 1e8)}, [(3.0, 3.0, None)]),  # the first refresh always takes
        # 1 → 1.01 (kept) → 1.02: 0.0133 from the factors in use, but 0.0066 from those seen last
        ({}, [(1.0, 1.0, None), (1.01, 1.0, 0.01 / 1.5), (1.02, 1.02, 0.02 / 1.5)]),
        ({"trace_thresholds": (0.0, 0.0)}, [(1.0, 1.0, None), (1.0, 1.0, 0.0), (1.000001, 1.000001, 1e-6 / 1.5)]),
        # it falls as it rises; stopped is for ever
        ({}, [(1.0, 1.0, None), (0.9851, 1.0, 0.0149 / 1.5), (0.9849, 0.9849, 0.0151 / 1.5)]),
        ({"trace_thresholds": (0.01, 0.001)}, [(1.0, 1.0, None), (1.0, 1.0, 0.0), (50.0, 1.0, 0.0), (900.0, 1.0, 0.0)]),
        # β = 0.25: 4, then 0.25 · 4 + 0.75 · 8 = 7; a kept refresh adds nothing
        ({"factor_decay": 0.25}, [(4.0, 4.0, None), (8.0, 7.0, 4 / 4.5), (7.0, 7.0, 0.0), (11.0, 10.0, 4 / 7.5)]),
    ]
    for options, story in stories:
        layer = Scalar(**options)
        for a, in_use, change in story:
            layer.show(a)
            assert layer.a == pytest.approx(in_use)
            assert layer.a_inverse == pytest.approx(1 / (in_use + 0.5**0.5))  # damping comes after the average
            assert layer.curvature.last_trace_change == pytest.approx(change, abs=1e-12)


def test_looking_changes_nothing():
    """A user prints the curvature before training; `factors()` and `inverses()` are copies.

    No state is made: one, however empty, would keep torch.distributed.checkpoint from making the real one.
    """
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    optimizer, other = THOR(model), THOR(twin)
    for curvature in optimizer.curvature.values():
        repr(curvature)
        assert (curvature.refreshes, curvature.stopped, curvature.last_trace_change) == (0, False, None)
        assert not curvature.rows_per_term
        for look in (curvature.factors, curvature.inverses):
            with pytest.raises(RuntimeError, match="no factors"):
                look()
    assert not optimizer.state
    stream = batches(3)
    train(model, optimizer, stream[:1])
    for curvature in optimizer.curvature.values():
        for tensor in (*curvature.factors(), *curvature.inverses()):
            tensor.fill_(1e6)
    train(model, optimizer, stream[1:])
    train(twin, other, stream)
    assert_same(weights(model), weights(twin))
