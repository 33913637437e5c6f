"""Each option is declared once: what reads the declarations cannot disagree with them."""

import inspect

import pytest

from tiny import mlp
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon
from torch_thor.optim.options import COUNTERS, OPTIONS, check
from torch_thor.training.optimizers import KEYS_OF


@pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, AGCSGD])
def test_every_option_of_a_signature_and_of_a_group_is_declared(make):
    """Its default holds, and the groups contain what is declared for groups."""
    arguments = inspect.signature(make).parameters.items()
    defaults = {name: argument.default for name, argument in arguments if name in OPTIONS}
    assert dict(arguments).keys() - defaults.keys() == {"params", "model"}
    check({name: default for name, default in defaults.items() if default is not None})
    (group,) = make(mlp()).param_groups
    scopes = {OPTIONS[name].scope for name in group.keys() - {"params", *COUNTERS}}
    assert scopes == {"group"}


@pytest.mark.parametrize("name", ["thor", "thor-muon", "lamb", "agc-sgd"])
def test_keys_of_recipes_mean_what_is_declared(name):
    fields = KEYS_OF[name].model_fields
    declared = {key for key in fields if key in OPTIONS and OPTIONS[key].type is not None}
    assert {"lr", "weight_decay"} <= declared
    assert all(fields[key].description == OPTIONS[key].meaning for key in declared)
    with pytest.raises(ValueError, match=r"must be a finite number ≥ 0"):
        KEYS_OF[name](weight_decay=-0.1)
