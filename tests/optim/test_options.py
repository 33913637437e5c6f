"""Each option is declared once: what reads the declarations cannot disagree with them."""

import inspect

import pytest
from test_contract import OPTIONS as ALL

from tiny import mlp
from torch_thor import THOR, ThorMuon
from torch_thor.optim.options import OPTIONS, check, default_of
from torch_thor.training.optimizers import KEYS_OF

NO_OPTIONS = {"params", "model"}


@pytest.mark.parametrize("make", ALL)
def test_every_option_of_a_signature_and_of_a_group_is_declared(make):
    signature = inspect.signature(make).parameters.keys() - NO_OPTIONS
    assert len(signature) > 5
    assert signature <= OPTIONS.keys()
    groups = make(mlp()).param_groups
    assert groups[0].keys() - {"params"} <= OPTIONS.keys()
    assert all(
        OPTIONS[name].scope in ("group", "counter") for name in groups[0].keys() - {"params"}
    )


@pytest.mark.parametrize("make", ALL)
def test_defaults_hold_and_are_those_of_the_signature(make):
    """Also of a subclass whose constructor does not name them."""

    class Own(make):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)

    for name, argument in inspect.signature(make).parameters.items():
        if name not in NO_OPTIONS:
            check(make, {name: argument.default} if argument.default is not None else {})
            assert default_of(Own, name) == default_of(make, name)
    with pytest.raises(ValueError, match=f"start from {default_of(make, 'lr')}|switches"):
        Own(mlp(), lr=-1.0)


def test_what_an_optimizer_does_not_have_is_as_declared():
    group = ThorMuon(mlp()).param_groups[0]
    assert "trace_thresholds" not in group
    assert group["trace_thresholds"] == OPTIONS["trace_thresholds"].default == (0.01, 0.0)
    with pytest.raises(KeyError):
        group["colour"]
    assert group.setdefault("kl_clip", 1.0) == group["kl_clip"] == 1.0


@pytest.mark.parametrize("name", ["thor", "thor-muon", "lamb", "agc-sgd"])
def test_keys_of_recipes_mean_what_is_declared(name):
    fields = KEYS_OF[name].model_fields
    declared = {key for key in fields if key in OPTIONS and OPTIONS[key].type is not None}
    assert {"lr", "weight_decay"} <= declared
    assert all(fields[key].description == OPTIONS[key].meaning for key in declared)
    with pytest.raises(ValueError, match=r"must be a finite number ≥ 0"):
        KEYS_OF[name](weight_decay=-0.1)


def test_ranks_compare_what_affects_the_weights():
    left_out = {name for name, option in OPTIONS.items() if not option.compared}
    assert left_out == {"update_interval", "last_loss_terms"}
    assert THOR(mlp()).defaults.keys() & left_out == left_out
