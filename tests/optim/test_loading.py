"""A state dict is loaded as a whole, or refused in one sentence; what is refused has changed nothing."""

import copy

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, cross_entropy, train, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon

STREAM = batches(8, dtype=torch.float32)


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def thor(model):
    return THOR(model, update_interval=3, split_dim=4, trace_thresholds=(0.0, 0.0))


def muon(model):
    return ThorMuon(model, update_interval=3)


def trained(make, steps=4):
    model = build()
    optimizer = make(model)
    train(model, optimizer, STREAM[:steps])
    return model, optimizer


def entry(saved, parameter):
    return saved["state"][parameter]


def put(parameter, key, value):
    """A fault: something else in the state of a parameter (0: the first weight, 4: that of '3')."""

    def fault(saved):
        entry(saved, parameter)[key] = value

    return fault


def spoil(parameter, key, value):
    def fault(saved):
        entry(saved, parameter)[key].view(-1)[-1] = value

    return fault


def drop(parameter, key):
    return lambda saved: entry(saved, parameter).pop(key)


def option(key, value):
    return lambda saved: saved["param_groups"][0].__setitem__(key, value)


def fewer_parameters(saved):
    saved["param_groups"][0]["params"].pop()


FAULTS = {
    "nan-in-an-inverse": (spoil(4, "A_inverse", torch.nan), "NaN or inf in 'A_inverse' of parameter '3.weight'"),
    "inf-in-an-inverse": (spoil(0, "A_inverse", torch.inf), "NaN or inf in 'A_inverse' of parameter '0.weight'"),
    "nan-in-a-factor": (spoil(0, "G", torch.nan), "NaN or inf in 'G' of parameter '0.weight'.*earlier checkpoint"),
    "nan-in-momentum": (spoil(2, "momentum_buffer", torch.nan), "NaN or inf in 'momentum_buffer' of .*'1.weight'"),
    "momentum-shape": (put(4, "momentum_buffer", torch.zeros(7, 6)), r"'3.weight' has shape \(7, 6\) and needs"),
    "factor-shape": (put(4, "A", torch.zeros(1, 3, 3)), r"split_dim=.*: A of layer '3' has shape \(1, 3, 3\) and"),
    "inverse-shape": (put(4, "G_inverse", torch.zeros(1, 5, 5)), "G_inverse of layer '3' has shape"),
    "no-inverse": (drop(4, "G_inverse"), "not whole: it lacks G_inverse of layer '3'"),
    "no-number": (drop(0, "due"), "not whole: it lacks due of layer '0'"),
    "no-rows": (put(0, "rows_per_term", 0.0), "layer '0': rows_per_term=0.0"),
    "nan-rows": (put(0, "rows_per_term", torch.nan), "layer '0': rows_per_term=nan"),
    "damping": (option("damping", 0.0), "damping=0.0"),
    "lr": (option("lr", torch.nan), "lr=nan"),
    "interval": (option("update_interval", "Sometimes(n=3)"), "is no known schedule"),
    "parameters": (fewer_parameters, "doesn't match the size"),
    "groups": (lambda saved: saved["param_groups"].append(saved["param_groups"][0]), "number of parameter groups"),
    "no-state": (lambda saved: saved.pop("state"), "not the state dict of an optimizer.*found 'param_groups'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_refused_state_dict_has_changed_nothing(name):
    """Bits, options, schedules, statistics in flight: the training goes on as if nobody had asked."""
    fault, message = FAULTS[name]
    (model, optimizer), (twin, other) = trained(thor, 6), trained(thor, 6)
    saved = copy.deepcopy(trained(thor, 4)[1].state_dict())
    fault(saved)
    schedule, its_schedule = (torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, other))
    for one in (model, twin):  # the refusal comes in the middle of a refresh step
        cross_entropy(STREAM[6][1])(one(STREAM[6][0])).backward()
    state, groups = optimizer.state, optimizer.param_groups
    with pytest.raises(ValueError, match=f"(?s){message}"):
        optimizer.load_state_dict(saved)
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert_same(optimizer.state_dict(), other.state_dict())
    for one, its_own in ((optimizer, schedule), (other, its_schedule)):
        one.step()
        one.zero_grad()
        its_own.step()
    assert optimizer.curvature["0"].refreshes == other.curvature["0"].refreshes == 3
    train(model, optimizer, STREAM[7:])
    train(twin, other, STREAM[7:])
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] == 0.025
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict(), other.state_dict())


def test_a_hook_of_the_users_that_raises_has_changed_nothing():
    (model, optimizer), (twin, other) = trained(thor), trained(thor)
    saved = copy.deepcopy(trained(thor, 6)[1].state_dict())

    def hook(_):
        raise KeyError("the user's own")

    handle = optimizer.register_load_state_dict_post_hook(hook)
    with pytest.raises(KeyError, match="the user's own"):
        optimizer.load_state_dict(saved)
    handle.remove()
    assert_same(optimizer.state_dict(), other.state_dict())
    train(model, optimizer, STREAM[4:])
    train(twin, other, STREAM[4:])
    assert_same(weights(model), weights(twin))


def test_what_a_hook_makes_of_the_dict_is_what_is_loaded():
    (model, optimizer), (_, other) = trained(thor), trained(thor, 6)

    def hook(_, saved):
        return {**saved, **other.state_dict()}

    optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": []}]})
    assert_same(optimizer.state_dict(), other.state_dict())
    train(model, optimizer, STREAM[4:5])


# ------------------------------------------------------------------------------------- of another optimizer

OTHERS = {
    "sgd": (lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), r"torch\.optim\.SGD"),
    "adamw": (lambda model: torch.optim.AdamW(model.parameters()), r"torch\.optim\.Adam or AdamW"),
    "rmsprop": (lambda model: torch.optim.RMSprop(model.parameters()), "another optimizer"),
    "agc-sgd": (lambda model: AGCSGD(model, momentum=0.9), "AGCSGD"),
    "lamb": (LAMB, "an optimizer of Adam's kind"),
    "thor": (thor, "THOR"),
    "thor-muon": (muon, "ThorMuon"),
}
OURS = {
    "thor": (thor, {"thor"}),
    "thor-muon": (muon, {"thor-muon"}),
    "agc-sgd": (lambda model: AGCSGD(model, lr=0.1, momentum=0.9), {"sgd", "agc-sgd"}),
    "lamb": (lambda model: LAMB(model, lr=0.02), {"adamw", "lamb"}),
}


@pytest.mark.parametrize("ours", OURS)
def test_the_state_dict_of_another_optimizer_is_refused(ours):
    """It names what it looks like; lr, options, state and weights are as before."""
    make, known = OURS[ours]
    for theirs, steps in [(name, steps) for name in OTHERS if name not in known for steps in (0, 2)]:
        make_other, looks_like = OTHERS[theirs]
        (model, optimizer), (twin, same) = trained(make), trained(make)
        _, other = trained(make_other, steps)
        message = f"looks like that of {looks_like} .*nothing was loaded.*load the model's weights, and let"
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(other.state_dict())
        assert_same(optimizer.state_dict(), same.state_dict())
        train(model, optimizer, STREAM[4:])
        train(twin, same, STREAM[4:])
        assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("name", OURS)
def test_what_is_no_state_dict_is_refused(name):
    _, optimizer = trained(OURS[name][0])
    before = copy.deepcopy(optimizer.state_dict())
    for wrong in ({}, [], None, build().state_dict()):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            optimizer.load_state_dict(wrong)
        assert_same(optimizer.state_dict(), before)


def test_nan_in_what_another_has_saved_is_refused():
    for ours, theirs in (("agc-sgd", "sgd"), ("lamb", "adamw"), ("thor", "thor")):
        (_, optimizer), (_, other) = trained(OURS[ours][0]), trained(OTHERS[theirs][0])
        saved = copy.deepcopy(other.state_dict())
        key = "exp_avg" if ours == "lamb" else "momentum_buffer"
        saved["state"][4][key][0, 0] = torch.nan
        with pytest.raises(ValueError, match=f"NaN or inf in '{key}' of parameter '3.weight'"):
            optimizer.load_state_dict(saved)
        assert_same(optimizer.state_dict(), trained(OURS[ours][0])[1].state_dict())


def test_lamb_takes_moments_and_betas_of_adamw_and_keeps_its_length_of_step():
    _, adamw = trained(lambda model: torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9), weight_decay=0.3))
    _, optimizer = trained(lambda model: LAMB(model, lr=0.02, eps=1e-5, weight_decay=0.1))
    optimizer.load_state_dict(adamw.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.02, (0.8, 0.9), 1e-5, 0.1)


SELECTIONS = {
    "left-out-now": (None, "-3", "it has factors of 3, which layers= leaves out here"),
    "only-others-now": (None, ["0", "5"], "it has factors of 3, which layers= leaves out here"),
    "left-out-then": (["-0", "-3"], None, "it lacks ._inverse of layer '0', ._inverse of layer '3'"),
    "other-ones": ("-0", ["0", "5"], "has factors of 3, .* here, and it lacks ._inverse of layer '0'"),
}


@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
def test_a_state_of_other_layers_is_refused(optimizer):
    """`layers=` is no part of a checkpoint; state, options and weights are as before."""
    for then, now, message in SELECTIONS.values():
        saved = trained(lambda model, then=then: optimizer(model, layers=then))[1].state_dict()
        (model, one), (twin, same) = (trained(lambda m, now=now: optimizer(m, layers=now)) for _ in range(2))
        with pytest.raises(ValueError, match=f"other preconditioned layers.*{message}.* with the layers= that"):
            one.load_state_dict(saved)
        assert_same(one.state_dict(), same.state_dict())
        train(model, one, STREAM[4:])
        train(twin, same, STREAM[4:])
        assert_same(weights(model), weights(twin))


def test_a_state_of_other_rows_of_a_fused_weight_is_refused():
    """One parameter holds the state of three projections."""

    def attention(**options):
        torch.manual_seed(1)
        model = nn.MultiheadAttention(4, 2, batch_first=True)
        optimizer = THOR(model, **options)
        x = torch.randn(6, 3, 4)
        model(x, x, x)[0].square().mean().backward()
        optimizer.step()
        return optimizer

    whole, partly = attention(), attention(layers="-k_proj")
    for saved, optimizer, what in ((whole, partly, "has factors of k_proj,"), (partly, whole, "lacks .*'k_proj'")):
        with pytest.raises(ValueError, match=f"it {what}"):
            optimizer.load_state_dict(saved.state_dict())
    attention(layers="-k_proj").load_state_dict(partly.state_dict())


def test_a_run_is_rolled_back_more_than_once():
    for make in (thor, muon):
        model, optimizer = trained(make)
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        ends = []
        for _ in range(3):
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            train(model, optimizer, STREAM[4:])
            ends.append(weights(model))
        assert_same(ends[1:], ends[:1] * 2)


def test_a_layer_that_was_frozen_when_the_state_was_saved_is_loaded():
    """It has no state at all, which no selection explains: it starts where it is trained."""
    model = build()
    model[3].requires_grad_(False)
    optimizer = thor(model)
    train(model, optimizer, STREAM[:4])
    other = thor(build())
    other.load_state_dict(optimizer.state_dict())
    assert other.curvature["0"].refreshes == 2
    assert other.curvature["3"].refreshes == 0
