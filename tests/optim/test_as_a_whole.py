"""A step is taken as a whole or not at all: what fails in it fails before a weight or a number of the state moves."""

import copy
import warnings

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, cross_entropy, train, weights
from torch_thor import THOR
from torch_thor.curvature import refresh

STREAM = batches(8, dtype=torch.float32)
MODES = {"plain": {}, "nesterov": {"nesterov": True}, "spectral": {"scaling": "spectral"}}


def build(dtype=torch.float32):
    """Norms come before and between the layers that are preconditioned, and a plain parameter after them."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.LayerNorm(5),
        nn.Linear(5, 7),
        nn.BatchNorm1d(7),
        nn.Tanh(),
        nn.Linear(7, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 3),
    ).to(dtype)


def pair(options, steps=0, **more):
    """Two alike, after so many steps: one meets the fault."""
    made = []
    for _ in range(2):
        model = build()
        settings = {"update_interval": 3, "weight_decay": 0.1, "trace_thresholds": (0.0, 0.0), **options, **more}
        optimizer = THOR(model, **settings)
        train(model, optimizer, STREAM[:steps])
        made.append((model, optimizer))
    return made


def backward(model, batch):
    cross_entropy(batch[1])(model(batch[0])).backward()


def assert_untouched(model, optimizer, before):
    assert_same(weights(model), before[0])
    after = optimizer.state_dict()
    assert str(after["param_groups"]) == str(before[1]["param_groups"])
    assert after["state"].keys() == before[1]["state"].keys()
    for index, state in after["state"].items():
        for key, value in state.items():
            known = before[1]["state"][index][key]
            same = torch.equal(value, known) if isinstance(value, torch.Tensor) else value == known
            assert same, (index, key)


class Bug(Exception):
    pass


def raising(after):
    """A callable of the user's that raises from the n-th call on, and what it says before."""
    calls = []

    def function(*_):
        calls.append(1)
        if len(calls) > after:
            raise Bug("the user's own")
        return True

    return function


def decay_filter(optimizer, after):
    optimizer.decay_filter = raising(after)


def update_interval(optimizer, after):
    optimizer.param_groups[0]["update_interval"] = raising(0)


def loss_terms(optimizer, after):
    optimizer.loss_terms = raising(0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(
    ("fault", "after"), [*((decay_filter, n) for n in (0, 1, 4, 9)), (update_interval, 0), (loss_terms, 0)]
)
def test_a_callable_of_the_users_that_raises(fault, after, steps, mode):
    """At any of its calls, on refresh steps and between."""
    (model, optimizer), (twin, other) = pair(MODES[mode], steps)
    backward(model, STREAM[steps])
    before = weights(model), copy.deepcopy(optimizer.state_dict())
    mine = optimizer.decay_filter, optimizer.param_groups[0]["update_interval"]
    fault(optimizer, after)
    before[1]["param_groups"] = copy.deepcopy(optimizer.state_dict())["param_groups"]
    if fault is update_interval and steps == 1:
        optimizer.step()  # between refreshes nobody asks it
        return
    with pytest.raises(Bug, match="the user's own"):
        optimizer.step()
    assert_untouched(model, optimizer, before)
    optimizer.decay_filter, optimizer.param_groups[0]["update_interval"] = mine
    optimizer.loss_terms = None
    optimizer.zero_grad()
    train(model, optimizer, STREAM[steps:])
    train(twin, other, STREAM[steps:])
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("where", ["_new_blocks", "_judge", "invert_"])
def test_out_of_memory_in_a_refresh(where, steps, mode, monkeypatch):
    """Which layers are due, what the trace rule found: as before, and the next step refreshes."""
    (model, optimizer), (twin, other) = pair(MODES[mode], steps)
    backward(model, STREAM[steps])
    before = weights(model), copy.deepcopy(optimizer.state_dict())

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(refresh, where, out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    if steps:
        assert_untouched(model, optimizer, before)
    assert_same(weights(model), before[0])
    assert all(layer.due and optimizer._registry.capture.gathers(layer) for layer in optimizer.curvature.values())
    assert not optimizer.last_refresh
    optimizer.zero_grad()
    train(model, optimizer, STREAM[steps:])
    train(twin, other, STREAM[steps:])
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict(), other.state_dict())


def test_warnings_that_are_errors_come_when_the_step_is_over():
    """What the step had to say was raised by the first layer in trouble, with the refresh half done."""
    (model, optimizer), (twin, other) = pair({}, 3)
    for one in (model, twin):
        backward(one, STREAM[3])
    for one in (optimizer, other):
        one.curvature["1"].statistics.sums()[0].blocks[0, 0, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="layer '1': its new factors hold NaN"):
            optimizer.step()
    with pytest.warns(RuntimeWarning, match="layer '1'") as caught:
        other.step()
    assert caught[0].filename == __file__
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict(), other.state_dict())


# --------------------------------------------------------------------------- what is changed between steps


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("split_dim", [2, None, "auto"])
def test_another_split_dim_in_a_group_is_refused(split_dim, steps, mode):
    (model, optimizer), (twin, other) = pair(MODES[mode], steps, split_dim=4)
    backward(model, STREAM[steps])
    before = weights(model), copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["split_dim"] = split_dim
    with pytest.raises(RuntimeError, match=rf"split_dim={split_dim!r}: .*'1' are cut in blocks of 4.*put .* back"):
        optimizer.step()
    optimizer.param_groups[0]["split_dim"] = 4
    assert_untouched(model, optimizer, before)
    optimizer.zero_grad()
    train(model, optimizer, STREAM[steps:])
    train(twin, other, STREAM[steps:])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_split_dim_that_cuts_nothing_else_is_no_error():
    (model, optimizer), _ = pair({}, 1, split_dim=128)
    optimizer.param_groups[0]["split_dim"] = 64
    train(model, optimizer, STREAM[1:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_model_that_is_converted_takes_its_state_along(mode, steps, momentum):
    """From float32 to float64: the run that follows is that of a float64 state of the same numbers."""
    if momentum == 0 and mode == "nesterov":
        return
    (model, optimizer), _ = pair(MODES[mode], steps, momentum=momentum)
    twin = copy.deepcopy(model).double()
    model.double()
    other = THOR(
        twin, update_interval=3, weight_decay=0.1, trace_thresholds=(0.0, 0.0), momentum=momentum, **MODES[mode]
    )
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                state[key] = value.double()
    other.load_state_dict(saved)
    stream = [(x.double(), labels) for x, labels in STREAM[steps:]]
    train(model, optimizer, stream)
    train(twin, other, stream)
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict(), other.state_dict())
    model.float()
    train(model, optimizer, STREAM)
    for state in optimizer.state.values():
        assert all(v.dtype == torch.float32 for v in state.values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_keeps_float32_state(dtype):
    (model, optimizer), _ = pair({}, 2)
    model.to(dtype)
    train(model, optimizer, [(x.to(dtype), labels) for x, labels in STREAM[2:]])
    for state in optimizer.state.values():
        assert all(v.dtype == torch.float32 for v in state.values() if isinstance(v, torch.Tensor))


def test_a_model_that_is_converted_between_backward_and_step():
    (model, optimizer), _ = pair({}, 3)
    backward(model, STREAM[3])
    model.double()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.curvature["1"].refreshes == 2
    assert optimizer.curvature["1"].factors()[0].dtype == torch.float64
    train(model, optimizer, [(x.double(), labels) for x, labels in STREAM[4:]])


@pytest.mark.parametrize("mode", MODES)
def test_momentum_of_another_shape_is_named(mode):
    (model, optimizer), (twin, other) = pair(MODES[mode], 1)
    buffer = optimizer.state[model[4].weight]["momentum_buffer"]
    optimizer.state[model[4].weight]["momentum_buffer"] = buffer.T.clone()
    backward(model, STREAM[1])
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"'4.weight' has shape \(6, 7\), and its 'momentum_buffer' has \(7, 6\)"):
        optimizer.step()
    assert_same(weights(model), before)
    optimizer.state[model[4].weight]["momentum_buffer"] = buffer
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, STREAM[2:])
    train(twin, other, STREAM[1:])
    assert_same(weights(model), weights(twin))


def test_a_weight_that_is_replaced_is_named_before_anything_moves():
    (model, optimizer), _ = pair({}, 2)  # the step after the next is a refresh
    model[4].weight = nn.Parameter(torch.randn(6, 7))
    backward(model, STREAM[2])
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"'4\.weight' is in none of the optimizer's parameter groups"):
        optimizer.step()
    assert_same(weights(model), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["1.weight", "4.bias", "5.weight"])
def test_a_sparse_gradient_of_what_is_no_embedding(name, mode):
    """Made by hand, or by an embedding that shares the weight: dense arithmetic, the same step."""
    (model, optimizer), (twin, other) = pair(MODES[mode], 1)
    for one in (model, twin):
        backward(one, STREAM[1])
    parameter = model.get_parameter(name)
    parameter.grad = parameter.grad.to_sparse()
    optimizer.step()
    other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# ------------------------------------------------------------------------------- modules that are replaced


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 3))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_head_that_was_replaced_is_said_once_and_no_longer_listed(steps):
    model = Net()
    optimizer = THOR(model, update_interval=3)
    train(model, optimizer, STREAM[:steps])
    model.head[0] = nn.Linear(6, 3)
    listed = {entry.name: entry.reason for entry in optimizer.coverage()}
    assert "not trained" in listed["head.0.weight"]
    still = weights(model.head)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            train(model, optimizer, STREAM)
    [message] = [str(w.message) for w in caught]
    assert "module 'head.0' is no longer in the model" in message
    assert "not trained, are head.0.weight, head.0.bias" in message
    assert "add_param_group" in message
    assert set(optimizer.curvature) == {"body"}
    assert_same(weights(model.head), still)
    assert optimizer.curvature["body"].refreshes >= 3


def test_modules_that_were_replaced_together_are_said_in_one_warning():
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(8)), nn.Linear(5, 3))
    optimizer = THOR(model, update_interval=2)
    for i in range(7):
        model[i] = nn.Linear(5, 5)
    with pytest.warns(RuntimeWarning) as caught:
        train(model, optimizer, STREAM[:3])
    (message,) = [str(w.message) for w in caught]
    assert "module '0' (likewise '1', '2', '3', '4', '5' and 1 more) is no longer in the model" in message
    assert "not trained, are 0.weight, 0.bias" in message
    assert "add_param_group" in message


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("told", [False, True])
def test_the_new_head_can_be_given(steps, told):
    """Before or after it was told of; it is preconditioned from its first step on."""
    model = Net()
    optimizer = THOR(model, update_interval=3, momentum=0.0)
    train(model, optimizer, STREAM[:steps])
    old = optimizer.curvature["head.0"]
    model.head[0] = nn.Linear(6, 3)
    if told:
        with pytest.warns(RuntimeWarning, match="'head.0' is no longer in the model"):
            train(model, optimizer, STREAM[:3])
    optimizer.add_param_group({"params": model.head.parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, STREAM[:1])
    assert optimizer.curvature["head.0"] is not old
    assert optimizer.curvature["head.0"].refreshes == 1
    assert {entry.name for entry in optimizer.coverage() if entry.preconditioned} == set(dict(model.named_parameters()))
    before = weights(model)
    train(model, optimizer, STREAM)
    assert not torch.equal(before["head.0.weight"], model.head[0].weight)


def test_replacing_the_only_layer_is_the_documented_error():
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = THOR(model)
    model[0] = nn.Linear(5, 3)
    assert "not trained" in repr(optimizer)
    backward(model, STREAM[0])
    with pytest.raises(ValueError, match="found no layer to precondition"):
        optimizer.step()


def test_a_module_that_is_wrapped_in_place_is_still_there():
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    optimizer, other = THOR(model, update_interval=2), THOR(twin, update_interval=2)
    model.head = Wrapped(model.head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, STREAM)
    train(twin, other, STREAM)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
