"""The optimizers of recipes: each gets the settings that the recipe has."""

import pytest
import torch

from torch_thor import AGCSGD, LAMB
from torch_thor.training.data import DataSpec, load_data
from torch_thor.training.errors import UserError
from torch_thor.training.experiment import new_run
from torch_thor.training.loop import train
from torch_thor.training.models import build_model
from torch_thor.training.optimizers import OPTIMIZERS, build_optimizer
from torch_thor.training.recipe import load_recipe


def built(name, *overrides):
    recipe = load_recipe("digits", [f"optimizer={name}", *overrides])
    return build_optimizer(name, build_model("small-cnn", 1, 10), recipe.optimizers[name])


def test_agc_sgd_has_its_settings_and_leaves_the_classifier_alone():
    words = ["lr=0.3", "weight_decay=0.01", "momentum=0.8", "nesterov=true", "clip_factor=0.04", "eps=0.002"]
    optimizer = built("agc-sgd", *words)
    assert isinstance(optimizer, AGCSGD)
    assert optimizer.excluded == ("head.weight", "head.bias")
    group = optimizer.param_groups[0]
    found = [group[key] for key in ("lr", "weight_decay", "momentum", "nesterov", "clip_factor", "eps")]
    assert found == [0.3, 0.01, 0.8, True, 0.04, 0.002]


def test_lamb_has_its_settings_and_excludes_biases():
    optimizer = built("lamb", "optimizers.lamb.lr=0.02", "weight_decay=0.3", "beta1=0.8", "beta2=0.95", "eps=1e-5")
    assert isinstance(optimizer, LAMB)
    assert optimizer.excluded == ("conv1.bias", "conv2.bias", "hidden.bias", "head.bias")
    group = optimizer.param_groups[0]
    assert [group[key] for key in ("lr", "weight_decay", "betas", "eps")] == [0.02, 0.3, (0.8, 0.95), 1e-5]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_cover_every_argument_of_value(name):
    """What a recipe does not say is the settings' default, and the optimizer takes it."""
    optimizer = built(name)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 8


def test_what_an_optimizer_refuses_is_the_users_error():
    with pytest.raises(UserError, match="optimizer agc-sgd: clip_factor=0"):
        built("agc-sgd", "clip_factor=0")


@pytest.mark.parametrize("name", ["lamb", "agc-sgd"])
def test_three_epochs_of_digits(name):
    """With the settings of the recipe."""
    recipe = load_recipe("digits", [f"optimizer={name}", "epochs=3", "device=cpu"])
    run = new_run(recipe, name, load_data(DataSpec("digits")))
    train(run)
    losses = [point.loss for point in run.record.steps]
    assert losses[-1] < 0.7 * losses[0]
