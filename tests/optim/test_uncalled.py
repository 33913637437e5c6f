"""Layers whose weight is used without calling them: named once, trained plainly, and waited for no longer."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tiny import assert_same, batches, told, train, weights
from torch_thor import THOR, ThorMuon

STREAM = batches(8)


class Bypassed(nn.Module):
    """Three layers, of which the middle one is used by its weight alone, or called, as the test says."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.calls = False

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = self.middle(h) if self.calls else functional.linear(h, self.middle.weight, self.middle.bias)
        return self.last(torch.tanh(h))


def build(optimizer=THOR, **options):
    torch.manual_seed(0)
    model = Bypassed().double()
    return model, optimizer(model, **{"update_interval": 2, **options})


def reasons(optimizer):
    return {entry.name: entry.reason for entry in optimizer.coverage() if entry.reason}


def test_the_layer_takes_plain_steps_and_the_others_their_own():
    """As if it had been left out by `layers=`, bit for bit."""
    for interval in (1, 2):
        model, optimizer = build(update_interval=interval)
        twin, left_out = build(update_interval=interval, layers="-middle")
        messages = told(train, model, optimizer, STREAM)
        train(twin, left_out, STREAM)
        assert_same(weights(model), weights(twin))
        assert len(messages) == 1
        for part in ("'middle'", "without calling", "layers="):
            assert part in messages[0]


@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
def test_the_layer_is_waited_for_no_longer(optimizer):
    """And coverage says so by name."""
    model, one = build(optimizer)
    assert not any("calling" in reason for reason in reasons(one).values())
    told(train, model, one, STREAM[:1])
    uncalled = {name for name, reason in reasons(one).items() if "without calling" in reason}
    assert uncalled == ({"middle.weight", "middle.bias"} if optimizer is THOR else {"middle.weight"})
    preconditioned = sum(math.prod(e.shape) for e in one.coverage() if e.preconditioned)
    assert f"{preconditioned} of {sum(p.numel() for p in model.parameters())} trained parameters" in repr(one)
    assert not told(train, model, one, STREAM[1:5])
    refreshes = {name: curvature.refreshes for name, curvature in one.curvature.items()}
    assert refreshes.pop("middle") == 0 < min(refreshes.values())


def test_a_layer_that_is_called_later_and_then_no_longer():
    """It is preconditioned then, keeps the inverses that it has, and is told of once."""
    model, optimizer = build()
    told(train, model, optimizer, STREAM[:2])
    model.calls = True
    assert not told(train, model, optimizer, STREAM[2:3])
    assert optimizer.curvature["middle"].refreshes == 1
    assert not reasons(optimizer)
    train(model, optimizer, STREAM[3:5])
    assert optimizer.curvature["middle"].refreshes == 2
    model.calls = False
    before = [inverse.clone() for inverse in optimizer.curvature["middle"].inverses()]
    (message,) = told(train, model, optimizer, STREAM[5:])
    assert "keeps the inverses" in message
    assert_same(list(optimizer.curvature["middle"].inverses()), before)
    assert not reasons(optimizer)


def test_one_layer_inside_torch_func():
    """The others have their statistics, so training goes on, and the message knows the cause."""
    model, optimizer = build()
    model.forward = lambda x: model.last(torch.func.vmap(model.middle)(torch.tanh(model.first(x))))
    (message,) = told(train, model, optimizer, STREAM[:2])
    assert "torch.func" in message
    assert optimizer.curvature["middle"].refreshes == 0
