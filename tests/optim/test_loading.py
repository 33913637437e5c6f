"""A state dict is loaded as a whole, or refused in one sentence, and then nothing has changed."""

import copy
from functools import partial

import pytest
import torch
from test_state import round_trip
from torch import nn

from tiny import assert_same, batches, cross_entropy, train, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon

STREAM = batches(8, dtype=torch.float32)
OURS = {
    "thor": partial(THOR, update_interval=3, split_dim=4, trace_thresholds=(0.0, 0.0)),
    "thor-muon": ThorMuon,
    "lamb": LAMB,
    "agc-sgd": partial(AGCSGD, momentum=0.9),
}
every_optimizer = pytest.mark.parametrize("make", OURS.values(), ids=OURS)


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


def assert_goes_on_as(one, other):
    """(model, optimizer) has the state of another, and takes the same steps."""
    assert_same(one[1].state_dict(), other[1].state_dict())
    for model, optimizer in (one, other):
        train(model, optimizer, STREAM[4:])
    assert_same(weights(one[0]), weights(other[0]))
    assert_same(one[1].state_dict(), other[1].state_dict())


def put(parameter, **entries):
    """A fault: something else in the state of a parameter (0: the first weight, 4: that of '3')."""
    return lambda saved: saved["state"][parameter].update(entries)


def option(**options):
    return lambda saved: saved["param_groups"][0].update(options)


FAULTS = [
    (put(4, momentum_buffer=torch.zeros(7, 6)), r"'3.weight' has shape \(7, 6\) and needs"),
    (put(4, A=torch.zeros(1, 3, 3)), r"A of layer '3' has shape \(1, 3, 3\)"),
    (lambda saved: saved["state"][4].pop("G_inverse"), "it lacks G_inverse of layer '3'"),
    (
        put(0, row_shards=4, G=torch.full((7, 4), -100.0)),
        "layer '0': G was saved for another number of processes, and its blocks for .* cannot be",
    ),
    (option(damping=torch.tensor(0.0)), "damping=0.0"),
    (option(update_interval="Sometimes(n=3)"), "'Sometimes.*or a schedule"),
    (lambda saved: saved["param_groups"][0]["params"].pop(), "doesn't match the size"),
]


def test_a_refused_state_dict_has_changed_nothing():
    """Bits, options, schedules, statistics in flight: training goes on as if nobody had asked."""
    (model, optimizer), (twin, other) = (trained(OURS["thor"], 6) for _ in range(2))
    right = trained(OURS["thor"])[1].state_dict()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, other)]
    for one in (model, twin):  # the refusals come in the middle of a refresh step
        cross_entropy(STREAM[6][1])(one(STREAM[6][0])).backward()
    state, groups = optimizer.state, optimizer.param_groups
    for fault, message in FAULTS:
        saved = copy.deepcopy(right)
        fault(saved)
        with pytest.raises(ValueError, match=f"(?s){message}"):
            optimizer.load_state_dict(saved)
        assert optimizer.state is state, message
        assert optimizer.param_groups is groups, message
        assert_same(optimizer.state_dict(), other.state_dict(), message)
    for one, schedule in zip((optimizer, other), schedules, strict=True):
        one.step()
        one.zero_grad()
        schedule.step()
        assert one.curvature["0"].refreshes == 3
        assert one.param_groups[0]["lr"] == 0.025
    assert_goes_on_as((model, optimizer), (twin, other))


@every_optimizer
def test_hooks_of_the_users(make):
    """A hook that raises has changed nothing; what other hooks make of a dict or a group stands."""
    pair, same = trained(make), trained(make)
    later, (_, optimizer) = trained(make, 6)[1].state_dict(), pair

    def refuse(_):
        raise KeyError("the user's own")

    handle = optimizer.register_load_state_dict_post_hook(refuse)
    with pytest.raises(KeyError, match="the user's own"):
        optimizer.load_state_dict(copy.deepcopy(later))
    handle.remove()
    assert_goes_on_as(pair, same)
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: {**saved, **later})
    optimizer.register_load_state_dict_post_hook(
        lambda one: one.param_groups[0].update(weight_decay=0.5)
    )
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": []}]})
    later["param_groups"][0]["weight_decay"] = 0.5
    assert_same(optimizer.state_dict(), later)


OTHERS = {
    **OURS,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters()),
}
RELATIVES = {"agc-sgd": "sgd", "lamb": "adamw"}  # whose state dicts are loaded


@pytest.mark.parametrize("ours", OURS)
def test_what_is_not_its_own_state_dict_is_refused(ours):
    """lr, options, state and weights are as before."""
    pair, same = trained(OURS[ours]), trained(OURS[ours])
    for theirs in OTHERS.keys() - {ours, RELATIVES.get(ours)}:
        message = f"is not from {type(pair[1]).__name__}: .*nothing was loaded.*Load the model's"
        for steps in (0, 2):
            with pytest.raises(ValueError, match=message):
                pair[1].load_state_dict(trained(OTHERS[theirs], steps)[1].state_dict())
    for wrong in ({}, [], None, build().state_dict()):
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):  # torch's own
            pair[1].load_state_dict(wrong)
    if ours in ("thor", "thor-muon"):  # `layers=` is no part of a checkpoint
        fewer = trained(OURS[ours], layers=["-0", "-3"])[1].state_dict()
        with pytest.raises(
            ValueError, match=r"._inverse of layer '0', ._inverse of .* layers= that"
        ):
            pair[1].load_state_dict(fewer)
    assert_goes_on_as(pair, same)


@pytest.mark.parametrize(
    ("saved", "present", "split_dim"),
    [
        *((nn.Linear(4, 7), nn.Linear(n, 7), size) for n, size in ((5, 128), (6, 4), (9, 4))),
        *((nn.Embedding(9, 4), nn.Embedding(*shape), 128) for shape in ((8, 4), (9, 3))),
    ],
)
def test_a_state_of_layers_of_another_shape_is_refused(saved, present, split_dim):
    """Only the last block may differ, or their number."""
    data = torch.randn(6, 4) if isinstance(saved, nn.Linear) else torch.randint(8, (4, 5))
    optimizer = THOR(nn.Sequential(saved), split_dim=split_dim)
    saved(data).square().mean().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="layer '0'"):
        THOR(nn.Sequential(present), split_dim=split_dim).load_state_dict(optimizer.state_dict())


def as_tensor(value):
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return value


@pytest.mark.filterwarnings("ignore:the state dict of")
@every_optimizer
def test_numbers_that_a_format_has_made_tensors_are_numbers_again(make):
    """RLlib and torch.distributed.checkpoint do so. An option that is missing keeps its value."""
    pair, same = (trained(make, weight_decay=0.25) for _ in range(2))
    saved = copy.deepcopy(pair[1].state_dict())
    for entries in (*saved["param_groups"], *saved["state"].values()):
        entries.update({k: as_tensor(value) for k, value in entries.items() if k != "params"})
    del saved["param_groups"][0]["weight_decay"]
    pair[1].load_state_dict(saved)
    assert_goes_on_as(pair, same)


@pytest.mark.parametrize("name", ["lamb", "thor-muon"])
@pytest.mark.parametrize("convert", [float, lambda t: t.reshape(1), lambda t: t.double()])
def test_a_step_is_a_float32_tensor_on_the_cpu_whatever_was_saved(name, convert):
    pair, same = trained(OURS[name]), trained(OURS[name])
    saved = copy.deepcopy(pair[1].state_dict())
    for entries in saved["state"].values():
        if "step" in entries:
            entries["step"] = convert(entries["step"])
    pair[1].load_state_dict(saved)
    assert_goes_on_as(pair, same)


@every_optimizer
def test_a_learning_rate_that_is_a_tensor_stays_one(make):
    """A scheduler changes it in place."""
    lr = torch.tensor(0.25)
    optimizer, other = make(build(), lr=lr), make(build(), lr=torch.tensor(0.5))
    assert optimizer.param_groups[0]["lr"] is lr
    other.load_state_dict(round_trip(optimizer.state_dict()))
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor)
    assert float(other.param_groups[0]["lr"]) == 0.25
