"""Layers whose weight is used without calling them: named once, trained plainly, and waited for no
longer.
"""

import torch
from torch import nn
from torch.nn import functional

from tiny import assert_same, batches, told, train, weights
from torch_thor import THOR

STREAM = batches(8)


class Bypassed(nn.Module):
    """Three layers, of which the middle one is used by its weight alone, or called, as the test
    says.
    """

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.calls = False

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = (
            self.middle(h)
            if self.calls
            else functional.linear(h, self.middle.weight, self.middle.bias)
        )
        return self.last(torch.tanh(h))


def build(**options):
    torch.manual_seed(0)
    model = Bypassed().double()
    return model, THOR(model, **{"update_interval": 2, **options})


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
        assert all("without calling" in reason for reason in reasons(optimizer).values())
        assert reasons(optimizer).keys() == reasons(left_out).keys()
        assert {name for name, layer in optimizer.curvature.items() if layer.refreshes} == {
            "first",
            "last",
        }
        assert len(messages) == 1
        for part in ("'middle'", "without calling", "layers="):
            assert part in messages[0]


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
    assert not told(train, model, optimizer, STREAM[5:])
    assert_same(list(optimizer.curvature["middle"].inverses()), before)
    assert not reasons(optimizer)


def test_one_layer_inside_torch_func():
    """The others have their statistics, so training goes on, and the message knows the cause."""
    model, optimizer = build()
    model.forward = lambda x: model.last(torch.func.vmap(model.middle)(torch.tanh(model.first(x))))
    (message,) = told(train, model, optimizer, STREAM[:2])
    assert "torch.func" in message
    assert optimizer.curvature["middle"].refreshes == 0
