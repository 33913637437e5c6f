"""A state dict is loaded as a whole, or refused in one sentence; what is refused has changed
nothing.
"""

import copy

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, cross_entropy, train, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon

STREAM = batches(8, dtype=torch.float32)


def build():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def thor(model):
    return THOR(model, update_interval=3, split_dim=4, trace_thresholds=(0.0, 0.0))


def muon(model):
    return ThorMuon(model, update_interval=3)


def trained(make, steps=4):
    model = build()
    optimizer = make(model)
    train(model, optimizer, STREAM[:steps])
    return model, optimizer


def put(parameter, **entries):
    """A fault: something else in the state of a parameter (0: the first weight, 4: that of '3')."""
    return lambda saved: saved["state"][parameter].update(entries)


def spoil(parameter, key, value):
    return lambda saved: saved["state"][parameter][key].view(-1)[-1:].fill_(value)


def drop(parameter, key):
    return lambda saved: saved["state"][parameter].pop(key)


def option(**options):
    return lambda saved: saved["param_groups"][0].update(options)


def assert_goes_on_as(one, other):
    """(model, optimizer) has the state of another, and takes the same steps."""
    assert_same(one[1].state_dict(), other[1].state_dict())
    for model, optimizer in (one, other):
        train(model, optimizer, STREAM[4:])
    assert_same(weights(one[0]), weights(other[0]))
    assert_same(one[1].state_dict(), other[1].state_dict())


FAULTS = {
    "nan-in-an-inverse": (spoil(4, "A_inverse", torch.nan),
    "NaN or inf in 'A_inverse' of parameter '3.weight'"),
    "inf-in-an-inverse": (spoil(0, "A_inverse", torch.inf),
    "NaN or inf in 'A_inverse' of parameter '0.weight'"),
    "nan-in-a-factor": (spoil(0, "G", torch.nan),
    "NaN or inf in 'G' of parameter '0.weight'.*earlier checkpoint"),
    "nan-in-momentum": (spoil(2, "momentum_buffer", torch.nan),
    "NaN or inf in 'momentum_buffer' of .*'1.weight'"),
    "momentum-shape": (put(4, momentum_buffer=torch.zeros(7, 6)),
    r"'3.weight' has shape \(7, 6\) and needs"),
    "factor-shape": (put(4, A=torch.zeros(1, 3, 3)), r"A of layer '3' has shape \(1, 3, 3\)"),
    "inverse-shape": (put(4, G_inverse=torch.zeros(1, 5, 5)), "G_inverse of layer '3' has shape"),
    "no-inverse": (drop(4, "G_inverse"), "not whole: it lacks G_inverse of layer '3'"),
    "no-number": (drop(0, "due"), "not whole: it lacks due of layer '0'"),
    "no-rows": (put(0, rows_per_term=0.0), "layer '0': rows_per_term=0.0"),
    "nan-rows": (put(0, rows_per_term=torch.nan),
    "rows_per_term=nan of parameter '0.weight' .* a finite number"),
    "shards": (
        put(0, row_shards=4, G=torch.full((7, 4), -100.0)),
        "layer '0': G was saved with 4 shards, and its blocks for .* cannot be",
    ),
    "damping": (option(damping=0.0), "damping=0.0"),
    "lr": (option(lr=torch.nan), "lr=nan"),
    "interval": (option(update_interval="Sometimes(n=3)"), "'Sometimes.*or a schedule"),
    "parameters": (lambda saved: saved["param_groups"][0]["params"].pop(),
    "doesn't match the size"),
    "groups": (lambda saved: saved["param_groups"].append(saved["param_groups"][0]),
    "number of parameter groups"),
    "no-state": (lambda saved: saved.pop("state"),
    "not the state dict of an optimizer.*found 'param_groups'"),
}  # fmt: skip


def test_a_refused_state_dict_has_changed_nothing():
    """Bits, options, schedules, statistics in flight: the training goes on as if nobody had
    asked.
    """
    (model, optimizer), (twin, other) = trained(thor, 6), trained(thor, 6)
    right = trained(thor, 4)[1].state_dict()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, other)]
    for one in (model, twin):  # the refusals come in the middle of a refresh step
        cross_entropy(STREAM[6][1])(one(STREAM[6][0])).backward()
    state, groups = optimizer.state, optimizer.param_groups
    for name, (fault, message) in FAULTS.items():
        saved = copy.deepcopy(right)
        fault(saved)
        with pytest.raises(ValueError, match=f"(?s){message}"):
            optimizer.load_state_dict(saved)
        assert optimizer.state is state, name
        assert optimizer.param_groups is groups, name
        assert_same(optimizer.state_dict(), other.state_dict(), name)
    for one, schedule in zip((optimizer, other), schedules, strict=True):
        one.step()
        one.zero_grad()
        schedule.step()
        assert one.curvature["0"].refreshes == 3
        assert one.param_groups[0]["lr"] == 0.025
    assert_goes_on_as((model, optimizer), (twin, other))


def test_hooks_of_the_users():
    """One that raises has changed nothing; what another makes of the dict is what is loaded."""
    (model, optimizer), (twin, other) = trained(thor), trained(thor)
    later = trained(thor, 6)[1].state_dict()

    def hook(_):
        raise KeyError("the user's own")

    handle = optimizer.register_load_state_dict_post_hook(hook)
    with pytest.raises(KeyError, match="the user's own"):
        optimizer.load_state_dict(copy.deepcopy(later))
    handle.remove()
    assert_goes_on_as((model, optimizer), (twin, other))
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: {**saved, **later})
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": []}]})
    assert_same(optimizer.state_dict(), later)


# ----------------------------------------------------------------------------- of another optimizer

OTHERS = {
    "sgd": (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        r"torch\.optim\.SGD",
    ),
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
def test_what_is_not_its_own_state_dict_is_refused(ours):
    """It names what it looks like; lr, options, state and weights are as before."""
    make, known = OURS[ours]
    pair, same = trained(make), trained(make)
    for theirs in OTHERS.keys() - known:
        for steps in (0, 2):
            message = (
                f"looks like that of {OTHERS[theirs][1]} .*nothing was loaded.*load the model's "
                "weights, and let"
            )
            with pytest.raises(ValueError, match=message):
                pair[1].load_state_dict(trained(OTHERS[theirs][0], steps)[1].state_dict())
    for wrong in ({}, [], None, build().state_dict()):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            pair[1].load_state_dict(wrong)
    for theirs in known:
        saved = copy.deepcopy(trained(OTHERS[theirs][0])[1].state_dict())
        key = "exp_avg" if ours == "lamb" else "momentum_buffer"
        saved["state"][4][key][0, 0] = torch.nan
        with pytest.raises(ValueError, match=f"NaN or inf in '{key}' of parameter '3.weight'"):
            pair[1].load_state_dict(saved)
    assert_goes_on_as(pair, same)


# ---------------------------------------------------------------------------------- of other layers


@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
def test_a_state_of_other_layers_is_refused(optimizer):
    """`layers=` is no part of a checkpoint; state, options and weights are as before."""
    for then, now, message in (
        (None, "-3", "it has factors of 3, which layers= leaves out here"),
        (None, ["0", "5"], "it has factors of 3, which layers= leaves out here"),
        (["-0", "-3"], None, "it lacks ._inverse of layer '0', ._inverse of layer '3'"),
        ("-0", ["0", "5"], "has factors of 3, .* here, and it lacks ._inverse of layer '0'"),
    ):
        saved = trained(lambda model, then=then: optimizer(model, layers=then))[1].state_dict()
        pair, same = (trained(lambda m, now=now: optimizer(m, layers=now)) for _ in range(2))
        with pytest.raises(
            ValueError, match=f"other preconditioned layers.*{message}.* with the layers= that"
        ):
            pair[1].load_state_dict(saved)
        assert_goes_on_as(pair, same)


def test_a_state_of_layers_of_another_shape_is_refused():
    """The layer is named. Only the last block may differ, or their number."""
    x, words = torch.randn(6, 3, 4), torch.randint(8, (4, 5))
    cases = [
        (nn.Linear(4, 7), nn.Linear(n, 7), x, size)
        for n, size in ((5, 128), (6, 128), (6, 4), (9, 4))
    ]
    cases += [(nn.Embedding(9, 4), nn.Embedding(*shape), words, 128) for shape in ((8, 4), (9, 3))]
    for one, other, data, split_dim in cases:
        optimizer = THOR(nn.Sequential(one), split_dim=split_dim)
        one(data).square().mean().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="layer '0'"):
            THOR(nn.Sequential(other), split_dim=split_dim).load_state_dict(optimizer.state_dict())
