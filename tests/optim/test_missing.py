"""Layers without statistics on a step that refreshes: the step is taken, one warning names them."""

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
    """Three layers, of which the middle one is called, or used by its weight alone."""

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


def by_a_copy(model, _):
    twin = copy.deepcopy(model)
    backward(twin, STREAM[0])
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        parameter.grad = other.grad


CAUSES = pytest.mark.parametrize("cause", [by_autograd_grad, by_zero_grad, by_a_copy])


@BOTH
@CAUSES
def test_the_first_step_is_taken_without_factors_and_the_next_with_them(make, cause):
    options = {"weight_decay": 0.1} if make is ThorMuon else {"max_update_ratio": None}
    model, optimizer = build(make, lr=0.05, **options)
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


def test_a_layer_whose_weight_is_used_without_calling_it_is_as_if_left_out():
    """Bit for bit, and told of once; the others take their own steps."""
    for interval in (1, 2):
        model, optimizer = build(THOR, calls=False, update_interval=interval)
        twin, left_out = build(THOR, calls=False, update_interval=interval, layers="-middle")
        (message,) = told(train, model, optimizer, STREAM)
        train(twin, left_out, STREAM)
        assert_same(weights(model), weights(twin))
        assert all("without calling" in reason for reason in reasons(optimizer).values())
        assert reasons(optimizer).keys() == reasons(left_out).keys()
        assert [bool(count) for count in refreshes(optimizer)] == [True, False, True]
        for part in ("'middle'", "without calling", "layers="):
            assert part in message


def test_a_layer_that_is_called_later_and_then_no_longer():
    """It is preconditioned then, keeps the inverses that it has, and is told of once."""
    model, optimizer = build(THOR, calls=False, update_interval=2)
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


class Merged(nn.Module):
    """An adapter of a bare parameter, as peft's ``target_parameters``: no layer is called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.down, self.up = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return F.linear(x, self.weight + self.up.weight @ self.down.weight)


@BOTH
def test_a_model_whose_layers_are_never_called_trains(make):
    model = Merged()
    optimizer = make(model)
    losses, messages = [], []
    for seed in range(12):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        losses.append((model(x) - x).square().mean())
        losses[-1].backward()
        messages += told(optimizer.step)
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    for layer in ("'down'", "'up'"):  # `down` has no gradient before `up` has moved
        assert sum(layer in message for message in messages) == 1
    assert "without calling" in reasons(optimizer)["down.weight"]
