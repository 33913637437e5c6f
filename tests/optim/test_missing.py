"""Layers without statistics on a step that refreshes: the step is taken, one warning names them."""

import copy

import pytest
import torch
from torch import nn

from tiny import assert_same, backward, batches, cross_entropy, told, train, weights
from torch_thor import THOR, ThorMuon

BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])
STREAM = batches(6, dtype=torch.float32)


def build(make, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, make(model, **{"update_interval": 1, **options})


def refreshes(optimizer):
    return [layer.refreshes for layer in optimizer.curvature.values()]


def loss_of(model, batch):
    x, labels = batch
    return cross_entropy(labels)(model(x))


def by_autograd_grad(model, optimizer):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model, STREAM[0]), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def by_inputs_and_weights(model, optimizer):
    """As the stages of a zero-bubble pipeline do."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    x = STREAM[0][0].clone().requires_grad_()
    loss = loss_of(model, (x, STREAM[0][1]))
    _, parts = stage_backward_input([loss], None, [x], iter(model.parameters()))
    stage_backward_weight(iter(model.parameters()), parts)


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


CAUSES = pytest.mark.parametrize(
    "cause", [by_autograd_grad, by_inputs_and_weights, by_zero_grad, by_a_copy]
)


@BOTH
@CAUSES
def test_the_first_step_is_taken_without_factors_and_the_next_with_them(make, cause):
    options = {"weight_decay": 0.1} if make is ThorMuon else {"max_update_ratio": None}
    model, optimizer = build(make, lr=0.05, **options)
    twin = copy.deepcopy(model)
    cause(model, optimizer)
    (message,) = told(optimizer.step)
    for part in ("layers '0', '2': ", "torch.autograd.grad", "without calling", "zero_grad()"):
        assert part in message
    assert refreshes(optimizer) == [0, 0]
    if make is THOR:  # plain momentum
        plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
        backward(twin, STREAM[0])
        plain.step()
        torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
    assert not told(train, model, optimizer, STREAM[1:2])
    assert refreshes(optimizer) == [1, 1]


@BOTH
@CAUSES
def test_a_later_refresh_keeps_the_factors(make, cause):
    model, optimizer = build(make)
    train(model, optimizer, STREAM[:2])
    before = [layer.inverses() for layer in optimizer.curvature.values()]
    factors = copy.deepcopy(before)
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


@BOTH
def test_other_layers_take_theirs(make):
    model, optimizer = build(make)
    x, labels = STREAM[0]
    hidden = copy.deepcopy(model[0])(x)  # another module, as a replica is
    loss = cross_entropy(labels)(model[2](torch.tanh(hidden)))
    loss.backward()
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    (message,) = told(optimizer.step)
    assert "layer '0': it has a gradient and no statistics" in message
    assert refreshes(optimizer) == [0, 1]


@BOTH
def test_a_state_that_is_loaded_between_backward_and_step(make):
    """The statistics of the step stay, as its gradients do."""
    model, optimizer = build(make)
    twin, other = build(make)
    for one, its in ((model, optimizer), (twin, other)):
        train(one, its, STREAM[:2])
        backward(one, STREAM[2])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for its in (optimizer, other):
        its.step()
        its.zero_grad()
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict(), other.state_dict())


@BOTH
def test_a_loaded_state_that_does_not_refresh_drops_the_statistics(make):
    """They would count in the next refresh otherwise."""
    model, optimizer = build(make, update_interval=2)
    train(model, optimizer, STREAM[:1])
    between = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, STREAM[1:2])
    backward(model, STREAM[2])  # of a step that refreshes
    optimizer.load_state_dict(between)
    optimizer.step()
    optimizer.zero_grad()
    twin, other = build(make)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    for one, its in ((model, optimizer), (twin, other)):
        train(one, its, STREAM[3:5])
    assert_same(weights(model), weights(twin))


@BOTH
def test_a_group_that_is_added_between_backward_and_step_waits_for_the_next(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = make(list(model[2].parameters()), model=model, update_interval=1)
    backward(model, STREAM[0])
    optimizer.add_param_group({"params": list(model[0].parameters())})
    told(optimizer.step)
    optimizer.zero_grad()
    assert refreshes(optimizer) == [0, 1]
    train(model, optimizer, STREAM[1:2])
    assert optimizer.curvature["0"].refreshes == 1


class Merged(nn.Module):
    """An adapter of a bare parameter, as peft's ``target_parameters``: no layer is called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.down, self.up = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return nn.functional.linear(x, self.weight + self.up.weight @ self.down.weight)


@BOTH
def test_a_model_whose_layers_are_never_called_trains(make):
    model = Merged()
    optimizer = make(model)
    losses, messages = [], []
    for seed in range(12):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        loss = (model(x) - x).square().mean()
        loss.backward()
        messages += told(optimizer.step)
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for layer in ("'down'", "'up'"):  # `down` has no gradient before `up` has moved
        assert sum(layer in message for message in messages) == 1
    reasons = {entry.name: entry.reason for entry in optimizer.coverage()}
    assert "without calling" in reasons["down.weight"]
