"""Between refreshes nothing of ours runs: no hook on a tensor, no kept activation, no statistics."""

import gc
import weakref

import pytest
import torch

from tiny import assert_same, batches, cross_entropy, mlp, train, weights
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


IDLE = {
    "between two refreshes": {"update_interval": 100},
    "all stopped": {"update_interval": 1, "trace_thresholds": (1e9, 1e8), "lr": 0.0},
    "one frozen": {"update_interval": 100},  # it never gets statistics, and keeps no other waiting
}


@pytest.mark.parametrize("why", IDLE)
def test_no_hook_and_no_node_of_ours(why):
    model, bare = mlp(), mlp()
    model[2].requires_grad_(why != "one frozen")
    optimizer = THOR(model, **IDLE[why])
    stream = batches(5)
    train(model, optimizer, stream[:2])
    assert all(curvature.stopped == (why == "all stopped") for curvature in optimizer.curvature.values())
    watches = [Watch(one[i]) for one in (model, bare) for i in (0, 2, 4)]
    for x, labels in stream[2:]:
        loss = cross_entropy(labels)(model(x))
        bare(x)
        assert not any(watch.hooked for watch in watches)
        assert [watch.kind for watch in watches[:3]] == [watch.kind for watch in watches[3:]]
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
    assert optimizer._capture.awaited


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
    """The usual notebook: construct again on the same model, go on."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    first = THOR(model)
    optimizer, other = THOR(model), THOR(twin)
    train(model, optimizer, batches(4))
    train(twin, other, batches(4))
    assert_same(weights(model), weights(twin))
    assert first.curvature["0"].refreshes == 0
    kept = [weakref.ref(one) for one in (first, optimizer)]
    del first, optimizer
    gc.collect()
    assert [one() for one in kept] == [None, None], "the model keeps its optimizer alive"
    watch = Watch(model[2])
    model(batches(1)[0][0])
    assert not watch.hooked
