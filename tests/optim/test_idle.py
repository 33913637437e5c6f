"""Between refreshes nothing of ours runs: no hook on a tensor, no kept activation, no statistics."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tiny import batches, cross_entropy, mlp, train
from torch_thor import THOR


class Watch:
    """Looks at what goes in and out of a layer, without keeping it."""

    def __init__(self, module):
        self.inputs, self.hooked = None, None
        module.register_forward_hook(self)

    def __call__(self, module, inputs, output):
        self.inputs = weakref.ref(inputs[0])
        self.output = weakref.ref(output)
        self.hooked = bool(output._backward_hooks)
        self.kind = type(output.grad_fn).__name__


def plain_node(x):
    return type(nn.Linear(5, 7).double()(x).grad_fn).__name__


def test_no_hook_and_no_node_of_ours_on_an_ordinary_step():
    model = mlp()
    optimizer = THOR(model, update_interval=4)
    watches = [Watch(model[i]) for i in (0, 2, 4)]  # registered after THOR's own hooks: sees what they did
    [(x, labels), *rest] = batches(6)
    train(model, optimizer, [(x, labels)])
    for step, (x, labels) in enumerate(rest[:3], start=1):
        loss = cross_entropy(labels)(model(x))
        for watch in watches:
            assert not watch.hooked, f"a tensor hook at step {step}"
            assert watch.kind == plain_node(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("refresh", [False, True])
def test_activations_die_as_they_do_without_us(refresh):
    """On an ordinary step the backward frees them; on a refresh they are gone after the step."""
    model = mlp()
    optimizer = THOR(model, update_interval=1 if refresh else 100)
    [first, (x, labels)] = batches(2)
    train(model, optimizer, [first])
    watches = [Watch(model[i]) for i in (2, 4)]
    loss = cross_entropy(labels)(model(x))
    alive = [watch.inputs() is not None for watch in watches]
    assert all(alive), "the watch itself does not work"
    loss.backward()
    del loss
    if refresh:
        optimizer.step()
        optimizer.zero_grad()
    assert [watch.inputs() for watch in watches] == [None, None]
    assert [watch.output() for watch in watches] == [None, None]


def test_a_forward_that_is_dropped_keeps_nothing():
    """Also when a refresh is due: an output nobody differentiates takes its activations with it, as in evaluation."""
    model = mlp()
    optimizer = THOR(model)
    watch = Watch(model[2])
    output = model(batches(1)[0][0])
    assert watch.inputs() is not None
    del output
    gc.collect()
    assert watch.inputs() is None
    with torch.no_grad():
        model(batches(1)[0][0])
    assert not watch.hooked
    assert watch.inputs() is None
    assert optimizer._capture.watching


@pytest.mark.parametrize("what", ["stopped", "frozen"])
def test_stopped_and_frozen_layers_cost_nothing(what):
    """If all have stopped, the next refresh looks like an ordinary step; a frozen one keeps no other waiting."""
    model, stopped = mlp(), what == "stopped"
    model[2].requires_grad_(stopped)
    options = {"update_interval": 1, "trace_thresholds": (1e9, 1e8)} if stopped else {"update_interval": 100}
    optimizer = THOR(model, lr=0.0, **options)
    stream = batches(3)
    train(model, optimizer, stream[:2])
    assert all(curvature.stopped == stopped for curvature in optimizer.curvature.values())
    watches = [Watch(model[i]) for i in (0, 2, 4)]
    loss = cross_entropy(stream[2][1])(model(stream[2][0]))
    assert not any(watch.hooked for watch in watches)
    loss.backward()
    optimizer.step()


def test_model_is_never_changed():
    """No layer swapped, no parameter or buffer added or renamed, `state_dict` as it was."""
    model = mlp()
    kinds = [(name, type(module), module) for name, module in model.named_modules()]
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    attributes = [set(vars(module)) for module in model.modules()]
    optimizer = THOR(model)
    train(model, optimizer, batches(2))
    assert kinds == [(name, type(module), module) for name, module in model.named_modules()]
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert list(model.named_buffers()) == []


def test_hooks_go_with_the_optimizer():
    """A dropped optimizer leaves a model that trains on under another one."""
    model = mlp()
    optimizer = THOR(model)
    state = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert state() is None, "the model keeps its optimizer alive"
    watch = Watch(model[2])
    loss = cross_entropy(batches(1)[0][1])(model(batches(1)[0][0]))
    assert not watch.hooked
    loss.backward()


def test_two_optimizers_one_after_another():
    """The usual notebook: construct again on the same model, go on."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    first = THOR(model)
    optimizer, other = THOR(model), THOR(twin)
    train(model, optimizer, batches(4))
    train(twin, other, batches(4))
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)
    assert first.curvature["0"].refreshes == 0
