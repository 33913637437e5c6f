"""Layers without statistics on a step that refreshes: the step is taken, a warning names them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tiny import assert_same, backward, batches, cross_entropy, told, train, weights
from torch_thor import THOR, ThorMuon

BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])
STREAM = batches(8, dtype=torch.float32)


class Bypassed(nn.Module):
    """Three layers; the middle layer is called, or only its weight is used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.calls = True

    def forward(self, x):
        h, middle = torch.tanh(self.first(x)), self.middle
        h = middle(h) if self.calls else F.linear(h, middle.weight, middle.bias)
        return self.last(torch.tanh(h))


def build(make, *, calls=True, **options):
    model = Bypassed()
    model.calls = calls
    return model, make(model, **{"update_interval": 1, **options})


def refreshes(optimizer):
    return [layer.refreshes for layer in optimizer.curvature.values()]


def reasons(optimizer):
    return {entry.name: entry.reason for entry in optimizer.coverage() if entry.reason}


def by_autograd_grad(model, optimizer):
    (x, labels), parameters = STREAM[0], list(model.parameters())
    gradients = torch.autograd.grad(cross_entropy(labels)(model(x)), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def by_zero_grad(model, optimizer):
    backward(model, STREAM[0])
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


CAUSES = pytest.mark.parametrize("cause", [by_autograd_grad, by_zero_grad])


@BOTH
@CAUSES
def test_the_first_step_is_taken_without_factors_and_the_next_with_them(make, cause):
    model, optimizer = build(make, lr=0.05, max_update_ratio=None)
    twin = copy.deepcopy(model)
    cause(model, optimizer)
    (message,) = told(optimizer.step)
    for part in ("layers 'first', 'middle', 'last': ", "torch.autograd.grad", "zero_grad()"):
        assert part in message
    assert refreshes(optimizer) == [0, 0, 0]
    if make is THOR:  # plain momentum
        plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
        backward(twin, STREAM[0])
        plain.step()
        torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
    assert not told(train, model, optimizer, STREAM[1:2])
    assert refreshes(optimizer) == [1, 1, 1]


@BOTH
@CAUSES
def test_a_later_refresh_keeps_the_factors(make, cause):
    model, optimizer = build(make)
    train(model, optimizer, STREAM[:2])
    factors = copy.deepcopy([layer.inverses() for layer in optimizer.curvature.values()])
    cause(model, optimizer)
    (message,) = told(optimizer.step)
    assert "keeps the factors" in message
    assert_same([layer.inverses() for layer in optimizer.curvature.values()], factors)
    taken = refreshes(optimizer)
    cause(model, optimizer)
    assert not told(optimizer.step)  # named once
    optimizer.zero_grad()
    train(model, optimizer, STREAM[2:3])
    assert all(now > then for now, then in zip(refreshes(optimizer), taken, strict=True))


def test_a_layer_whose_weight_is_used_without_calling_it_is_trained_as_if_left_out():
    """Bit for bit, and a single warning names the layer; the others are preconditioned."""
    model, optimizer = build(THOR, calls=False, update_interval=2)
    twin, left_out = build(THOR, calls=False, update_interval=2, layers="-middle")
    (message,) = told(train, model, optimizer, STREAM)
    train(twin, left_out, STREAM)
    assert_same(weights(model), weights(twin))
    assert "without calling" in reasons(optimizer)["middle.weight"]
    assert reasons(optimizer).keys() == reasons(left_out).keys()
    assert [bool(count) for count in refreshes(optimizer)] == [True, False, True]
    for part in ("'middle'", "without calling", "layers="):
        assert part in message


def test_a_layer_that_is_called_later_is_preconditioned_then():
    model, optimizer = build(THOR, calls=False, update_interval=2)
    told(train, model, optimizer, STREAM[:2])
    model.calls = True
    assert not told(train, model, optimizer, STREAM[2:3])
    assert optimizer.curvature["middle"].refreshes == 1
    assert not reasons(optimizer)
