"""Settings read off the optimizers: the keys and defaults that recipes had when they were written out."""

from dataclasses import fields

import pytest
import torch

from torch_thor import LAMB
from torch_thor.training import UserError
from torch_thor.training.optimizers import OPTIMIZERS, settings_of
from torch_thor.training.optimizers.settings import documented_arguments, settings_dict

GEOMETRIC = {"kind": "geometric", "first": 1, "last": 50, "factor": 1.5}
THOR_KEYS = {
    "lr": 0.05, "weight_decay": 0.0, "damping": 0.03, "momentum": 0.9, "nesterov": False, "update_interval": 100,
    "trace_thresholds": (0.01, 0.0), "split_dim": 128, "factor_decay": 0.0, "max_update_ratio": 0.01,
    "kl_clip": None, "layers": None, "fisher": "empirical", "decay_filter": None, "divide_curvature": False,
}  # fmt: skip
THOR_MUON_KEYS = {
    "lr": 0.08, "weight_decay": 0.0, "damping": 0.1, "momentum": 0.8, "nesterov": True, "update_interval": GEOMETRIC,
    "split_dim": 128, "factor_decay": 0.5, "max_update_ratio": 0.15, "layers": None, "decay_filter": None,
    "divide_curvature": False,
}  # fmt: skip
SGD = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}
ADAM = {"lr": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}
KEYS = {
    "thor": THOR_KEYS,
    "thor-muon": THOR_MUON_KEYS,
    "sgd": {**SGD, "nesterov": False},
    "momentum": SGD,
    "nesterov": SGD,
    "adagrad": {"lr": 0.01, "weight_decay": 0.0, "lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "rmsprop": {"lr": 0.01, "weight_decay": 0.0, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False},
    "adadelta": {"lr": 1.0, "weight_decay": 0.0, "rho": 0.9, "eps": 1e-6},
    "adam": ADAM,
    "adamw": {**ADAM, "weight_decay": 0.01},
    "muon": {
        "lr": 1e-3, "weight_decay": 0.01, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw", "adamw_lr": None,
        "adamw_embeddings": False,
    },
    "lamb": {"lr": 0.01, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6},
    "agc-sgd": {
        **SGD, "nesterov": False, "dampening": 0.0, "dampen_first": False, "clip_factor": 0.01, "eps": 1e-3,
    },
}  # fmt: skip


def test_keys_and_defaults_of_recipes_are_what_they_were():
    found = {
        name: {item.name: getattr(entry.settings(), item.name) for item in fields(entry.settings)}
        for name, entry in OPTIMIZERS.items()
    }
    assert found == KEYS
    types = {name: {key: type(value) for key, value in keys.items()} for name, keys in found.items()}
    assert types == {name: {key: type(value) for key, value in keys.items()} for name, keys in KEYS.items()}


def test_a_default_that_is_a_mapping_is_each_objects_own():
    first, second = (OPTIMIZERS["thor-muon"].settings() for _ in range(2))
    first.update_interval["last"] = 7
    assert second.update_interval == GEOMETRIC


def test_betas_are_two_keys_and_one_argument():
    assert settings_dict(OPTIMIZERS["lamb"].settings(beta2=0.99))["betas"] == (0.9, 0.99)


def test_meanings_are_those_of_the_documentation():
    said = documented_arguments(torch.optim.RMSprop)
    assert said["eps"] == "Term added to the denominator to improve numerical stability."
    assert said["centered"].startswith("If True, compute the centered RMSProp, the gradient is normalized")
    ours = documented_arguments(LAMB)
    assert ours["beta1"] == ours["beta2"] == ours["betas"]
    assert ours["eps"] == "ε > 0, added to the root of the second moment."
    damping = OPTIMIZERS["thor"].settings.__doc__.partition("damping: ")[2].partition("\n")[0]
    assert "None" not in damping  # the default is the recipe's


def test_only_the_rules_that_are_asked_for():
    class Plain:
        """Nothing.

        Args:
            lr: Learning rate.
            weight_decay: Weight decay.
            eps: Something.
        """

        def __init__(self, params, lr=1.0, weight_decay=0, eps=0.5):
            pass

    checked = settings_of("Checked", Plain, module=__name__)
    free = settings_of("Free", Plain, module=__name__, rules=(), defaults={"eps": 2})
    with pytest.raises(UserError, match="eps=-1 must be 0 or more"):
        checked(eps=-1)
    assert (free(eps=-1).eps, free().eps, checked().lr) == (-1, 2.0, 1.0)
