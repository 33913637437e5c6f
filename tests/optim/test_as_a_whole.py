"""Steps that fail, and models that change between two steps."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from tiny import assert_same, backward, batches, train, weights
from torch_thor import THOR, ThorMuon
from torch_thor.curvature import refresh

STREAM = batches(8, dtype=torch.float32)
MODES = {
    "natural": partial(THOR, trace_thresholds=(0.0, 0.0), nesterov=True),
    "orthogonal": ThorMuon,
}


def pair(mode, steps):
    """Return two equal (model, optimizer) after some steps."""
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        model = nn.Sequential(
            *(nn.LayerNorm(5), nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh()),
            *(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        )
        optimizer = MODES[mode](model, update_interval=3, weight_decay=0.1, split_dim=4)
        train(model, optimizer, STREAM[:steps])
        made.append((model, optimizer))
    return made


def assert_go_on_alike(left, right, stream, where="it"):
    for model, optimizer in (left, right):
        train(model, optimizer, stream)
    assert_same(weights(left[0]), weights(right[0]), where)
    assert_same(left[1].state_dict(), right[1].state_dict(), where)


class Bug(Exception):
    pass


def bug(*_, **__):
    raise Bug("the user's own")


OWN = Bug, "the user's own"
SPLIT = RuntimeError, r"split_dim=2: A of layer '1' has shape \(5, 4\) .*put it back"
# fault -> what is replaced between backward pass and step, the error, and after how many steps; a
# refresh is due in steps 0 and 3
FAULTS = {
    "update_interval": (
        lambda o, patch: patch.setitem(o.param_groups[0], "update_interval", bug), OWN, (0, 3)
    ),
    "memory": (lambda _, patch: patch.setattr(refresh, "invert_", bug), OWN, (0, 3)),
    "split_dim": (
        lambda o, patch: patch.setitem(o.param_groups[0], "split_dim", 2), SPLIT, (1, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_fails_changes_nothing(fault, monkeypatch):
    """Neither weights nor state nor the due layers; training goes on as without the fault."""
    make, (error, message), when = FAULTS[fault]
    for mode, steps in itertools.product(MODES, when):
        (model, optimizer), (twin, other) = pair(mode, steps)
        backward(model, STREAM[steps])
        before = weights(model), copy.deepcopy(optimizer.state_dict())
        with monkeypatch.context() as patch:
            make(optimizer, patch)
            with pytest.raises(error, match=message):
                optimizer.step()
        where = f"{mode}, step {steps}"
        assert_same(weights(model), before[0], where)
        if steps:  # the first step begins with a state of zeros
            assert_same(optimizer.state_dict(), before[1], where)
        assert all(layer.due == (steps != 1) for layer in optimizer.curvature.values()), where
        optimizer.zero_grad()
        assert_go_on_alike((model, optimizer), (twin, other), STREAM[steps:], where)


@pytest.mark.parametrize("mode", MODES)
def test_the_state_follows_a_model_that_is_converted(mode):
    """In float64 it has the same numbers; half precision has a state in float32."""
    (model, optimizer), (twin, other) = pair(mode, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if torch.is_tensor(value) and key != "step":
                state[key] = value.double()
    model.double()
    twin.double()
    other.load_state_dict(saved)
    stream = [(x.double(), labels) for x, labels in STREAM[2:]]
    assert_go_on_alike((model, optimizer), (twin, other), stream)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model.to(dtype)
        train(model, optimizer, [(x.to(dtype), labels) for x, labels in STREAM])
        entries = [v for state in optimizer.state.values() for v in state.values()]
        assert {v.dtype for v in entries if torch.is_tensor(v)} == {torch.float32}


@pytest.mark.parametrize("make", [THOR, ThorMuon])
def test_a_replaced_layer_is_listed_as_not_trained_and_can_be_added(make):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = make(model, update_interval=3)
    train(model, optimizer, STREAM[:3])
    model[2] = nn.Linear(6, 3)
    listed = {entry.name: entry.reason for entry in optimizer.coverage()}
    assert "not trained" in listed["2.weight"]
    before = model[2].weight.detach().clone()
    train(model, optimizer, STREAM)
    assert torch.equal(model[2].weight, before)
    assert set(optimizer.curvature) == {"0"}
    optimizer.add_param_group({"params": model[2].parameters()})
    train(model, optimizer, STREAM)
    assert optimizer.curvature["2"].refreshes >= 1
    assert not torch.equal(model[2].weight, before)
