"""A state dict is loaded completely, or refused with one sentence before anything changes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tiny import assert_same, backward, batches, train, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon

STREAM = batches(8, dtype=torch.float32)
OURS = {
    "thor": partial(THOR, update_interval=3, split_dim=4, trace_thresholds=(0.0, 0.0)),
    "thor-muon": ThorMuon,
    "lamb": LAMB,
    "agc-sgd": partial(AGCSGD, momentum=0.9),
}


def build():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def trained(make, steps=4, **options):
    model = build()
    optimizer = make(model, **options)
    train(model, optimizer, STREAM[:steps])
    return model, optimizer


def assert_go_on_alike(left, right):
    """Both (model, optimizer) have the same state and take the same steps."""
    assert_same(left[1].state_dict(), right[1].state_dict())
    for model, optimizer in (left, right):
        train(model, optimizer, STREAM[4:])
    assert_same(weights(left[0]), weights(right[0]))
    assert_same(left[1].state_dict(), right[1].state_dict())


def put(parameter, **entries):
    """Return a fault in the state of parameter 0, the first weight, or 4, the weight of '3'."""
    return lambda saved: saved["state"][parameter].update(entries)


def option(**options):
    return lambda saved: saved["param_groups"][0].update(options)


FAULTS = [
    (put(4, momentum_buffer=torch.zeros(7, 6)), r"'3.weight' has shape \(7, 6\) and needs"),
    (put(4, A=torch.zeros(1, 3, 3)), r"A of layer '3' has shape \(1, 3, 3\)"),
    (lambda saved: saved["state"][4].pop("G_inverse"), "it lacks G_inverse of layer '3'"),
    (
        put(0, row_shards=4, G=torch.full((7, 4), -100.0)),
        "layer '0': G was saved for another number of processes, and its blocks here cannot be",
    ),
    (option(damping=torch.tensor(0.0)), "damping=0.0"),
    (option(update_interval="Sometimes(n=3)"), "'Sometimes.*or a schedule"),
    (lambda saved: saved["param_groups"][0]["params"].pop(), "doesn't match the size"),
]


def test_a_refused_state_dict_changes_nothing():
    """The refusals come in the middle of a refresh step, and training goes on as without them."""
    (model, optimizer), (twin, other) = (trained(OURS["thor"], 6) for _ in range(2))
    right = trained(OURS["thor"])[1].state_dict()
    for each in (model, twin):
        backward(each, STREAM[6])
    state, groups = optimizer.state, optimizer.param_groups
    for fault, message in FAULTS:
        saved = copy.deepcopy(right)
        fault(saved)
        with pytest.raises(ValueError, match=f"(?s){message}"):
            optimizer.load_state_dict(saved)
        assert optimizer.state is state, message
        assert optimizer.param_groups is groups, message
        assert_same(optimizer.state_dict(), other.state_dict(), message)
    for each in (optimizer, other):
        each.step()
        each.zero_grad()
        assert each.curvature["0"].refreshes == 3
    assert_go_on_alike((model, optimizer), (twin, other))


OTHERS = {
    **OURS,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters()),
}
RELATIVES = {"agc-sgd": "sgd", "lamb": "adamw"}  # whose state dicts are loaded


@pytest.mark.parametrize("ours", OURS)
def test_a_state_dict_of_another_optimizer_is_refused_and_changes_nothing(ours):
    pair, same = trained(OURS[ours]), trained(OURS[ours])
    for theirs in OTHERS.keys() - {ours, RELATIVES.get(ours)}:
        message = f"is not from {type(pair[1]).__name__}: .*nothing was loaded.*Load the model's"
        for steps in (0, 2):
            with pytest.raises(ValueError, match=message):
                pair[1].load_state_dict(trained(OTHERS[theirs], steps)[1].state_dict())
    if ours in ("thor", "thor-muon"):  # `layers=` is no part of a checkpoint
        fewer = trained(OURS[ours], layers=["-0", "-3"])[1].state_dict()
        said = r"._inverse of layer '0', ._inverse of .* layers= that"
        with pytest.raises(ValueError, match=said):
            pair[1].load_state_dict(fewer)
    assert_go_on_alike(pair, same)
