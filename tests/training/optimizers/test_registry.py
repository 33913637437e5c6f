"""One contract for every optimizer that a recipe can name, and torch's own as the oracle of those that are torch's."""

import copy
import inspect
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_thor import AGCSGD, LAMB
from torch_thor.training import UserError, load_recipe, train
from torch_thor.training import image_run as new_run
from torch_thor.training.data import DataSpec, load_data
from torch_thor.training.models import build_model
from torch_thor.training.optimizers import OPTIMIZERS, build_optimizer, default_settings

SGD, Adagrad, RMSprop = torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop
Adadelta, Adam, AdamW = torch.optim.Adadelta, torch.optim.Adam, torch.optim.AdamW

# name: (torch's class, what it is built with by default, other settings, what it is built with then)
OWN = {
    "sgd": (
        SGD,
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.3, "momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.3, "momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
    ),
    "momentum": (
        SGD,
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1},
        {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1},
    ),
    "nesterov": (
        SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1},
        {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1, "nesterov": True},
    ),
    "adagrad": (
        Adagrad,
        {},
        {"lr": 0.3, "weight_decay": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.4, "eps": 1e-3},
        {"lr": 0.3, "weight_decay": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.4, "eps": 1e-3},
    ),
    "rmsprop": (
        RMSprop,
        {},
        {"lr": 0.3, "weight_decay": 0.1, "alpha": 0.5, "eps": 1e-3, "momentum": 0.6, "centered": True},
        {"lr": 0.3, "weight_decay": 0.1, "alpha": 0.5, "eps": 1e-3, "momentum": 0.6, "centered": True},
    ),
    "adadelta": (
        Adadelta,
        {},
        {"lr": 0.3, "weight_decay": 0.1, "rho": 0.5, "eps": 1e-3},
        {"lr": 0.3, "weight_decay": 0.1, "rho": 0.5, "eps": 1e-3},
    ),
    "adam": (
        Adam,
        {},
        {"lr": 0.3, "weight_decay": 0.1, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3, "amsgrad": True},
        {"lr": 0.3, "weight_decay": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "amsgrad": True},
    ),
    "adamw": (
        AdamW,
        {},
        {"lr": 0.3, "weight_decay": 0.1, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3, "amsgrad": True},
        {"lr": 0.3, "weight_decay": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "amsgrad": True},
    ),
}
LRS = {
    **{"thor-muon": 0.04, "sgd": 0.03, "momentum": 0.03, "nesterov": 0.03, "muon": 0.05, "agc-sgd": 0.1},
    **{"adadelta": 20.0, "adagrad": 0.1, "adam": 0.02, "adamw": 0.02},  # Adadelta starts very slowly
}


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(24, 1, 6, 6, generator=generator)
    return images, images.mean(dim=(1, 2, 3)).mul(8).round().clamp(-1, 1).add(1).long()


def go(model, optimizer, steps):
    losses = []
    for step in steps:
        images, labels = batch(step)
        loss = functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def settings(name, **values):
    return OPTIMIZERS[name].settings(**values)


def test_every_name_is_here():
    first_order = {"sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adadelta", "adam", "adamw"}
    assert first_order == set(OWN)
    assert {*first_order, "thor", "muon", "lamb", "agc-sgd"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("which", ["default", "other"])
def test_it_is_torchs_own_to_the_bit(name, which):
    kind, default, changed, arguments = OWN[name]
    model, twin = net(), net()
    ours = build_optimizer(name, model, settings(name, **(changed if which == "other" else {})))
    theirs = kind(twin.parameters(), **(arguments if which == "other" else default))
    assert type(ours) is kind
    assert ours.defaults == theirs.defaults
    assert go(model, ours, range(4)) == go(twin, theirs, range(4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("name", OWN)
def test_the_other_settings_differ_from_the_default_in_every_key(name):
    standard, changed = settings(name), OWN[name][2]
    assert set(changed) == {item.name for item in fields(standard)}
    assert all(getattr(standard, key) != value for key, value in changed.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains(name):
    model = net()
    losses = go(model, build_optimizer(name, model, settings(name, lr=LRS.get(name, 0.01))), range(80))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_goes_on_from_its_state(name):
    model = net()
    optimizer = build_optimizer(name, model)
    go(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    other = build_optimizer(name, twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's loading shares tensors
    assert go(model, optimizer, range(3, 6)) == go(twin, other, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_setting_is_documented(name):
    standard = settings(name)
    said = "".join(inspect.getdoc(kind) or "" for kind in type(standard).__mro__[:-1])
    assert all(f"    {item.name}: " in said for item in fields(standard))


@pytest.mark.parametrize(("name", "key"), [("sgd", "lrr"), ("adam", "betas"), ("thor", "nosuch"), ("lamb", "exclude")])
def test_an_unknown_key_is_one_line(name, key):
    with pytest.raises(UserError, match=rf"there is no key .*{key}") as caught:
        load_recipe("digits", [f"optimizers.{name}.{key}=1"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["sgd", "thor", "agc-sgd"])  # the rules are those of their common class
@pytest.mark.parametrize("word", ["lr=0", "lr=nan", "lr=.inf", "weight_decay=-1", "lr=much"])
def test_values_that_none_can_have(name, word):
    with pytest.raises(UserError, match=word.split("=")[0]) as caught:
        load_recipe("digits", [f"optimizers.{name}.{word}"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("sgd", "momentum", 1),
        ("momentum", "momentum", -0.1),
        ("nesterov", "momentum", 1.5),
        ("nesterov", "momentum", 0),
        ("adagrad", "lr_decay", -1),
        ("adagrad", "initial_accumulator_value", -1),
        ("adagrad", "eps", -1),
        ("rmsprop", "alpha", 1),
        ("rmsprop", "momentum", 1),
        ("rmsprop", "eps", -1),
        ("adadelta", "rho", 1.1),
        ("adadelta", "eps", -1),
        ("adam", "beta1", 1),
        ("adam", "beta2", float("nan")),
        ("adam", "eps", float("inf")),
        ("adamw", "beta1", -1),
        ("muon", "momentum", 1),
    ],
)
def test_values_that_this_one_cannot_have(name, key, value):
    with pytest.raises(UserError, match=rf"^{key}={value} must"):
        settings(name, **{key: value})


def test_nesterov_without_momentum():
    with pytest.raises(UserError, match=r"momentum=0 must be above 0 for Nesterov's"):
        settings("sgd", momentum=0, nesterov=True)


def test_what_an_optimizer_refuses_itself_names_it():
    with pytest.raises(UserError, match=r"optimizer muon: Adjust learning rate function mine"):
        build_optimizer("muon", net(), settings("muon", adjust_lr_fn="mine"))


def test_settings_of_another_optimizer_are_refused():
    assert set(default_settings()) == set(OPTIMIZERS)
    with pytest.raises(UserError, match="not for sgd: pass an object of class SGDSettings"):
        build_optimizer("sgd", net(), settings("adam"))
    with pytest.raises(UserError, match="not for adam: pass an object of class AdamSettings"):
        build_optimizer("adam", net(), settings("adamw"))
    with pytest.raises(UserError, match="optimizer=sdg is not an optimizer"):
        build_optimizer("sdg", net())


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


def test_agc_sgds_dampening_reaches_recipes():
    optimizer = built("agc-sgd", "dampening=0.3", "dampen_first=true", "nesterov=true")
    group = optimizer.param_groups[0]
    assert (group["dampening"], group["dampen_first"], group["nesterov"]) == (0.3, True, True)
    with pytest.raises(UserError, match=r"optimizer agc-sgd: nesterov=True: .* dampen_first=True"):
        built("agc-sgd", "dampening=0.3", "nesterov=true")


@pytest.mark.parametrize("name", ["thor", "thor-muon"])
@pytest.mark.parametrize(
    ("word", "decaying"),
    [
        ("decay_filter=null", "conv1 conv1.bias conv2 conv2.bias hidden hidden.bias head head.bias"),
        ("decay_filter='*.weight'", "conv1 conv2 hidden head"),
        ("decay_filter=-*.bias", "conv1 conv2 hidden head"),
        ("decay_filter=['*.weight', -head]", "conv1 conv2 hidden"),
        ("decay_filter=[conv1, hidden, '-*.bias']", "conv1 hidden"),
    ],
)
def test_patterns_say_what_decays(name, word, decaying):
    """With all gradients 0, a step of THOR is its weight decay."""
    optimizer = built(name, word, "lr=0.1", "weight_decay=0.5", "momentum=0", "nesterov=false", "damping=0.1")
    before = {key: p.detach().clone() for key, p in optimizer.model.named_parameters()}
    optimizer.model(torch.zeros(2, 1, 8, 8)).sum().mul(0).backward()
    optimizer.step()
    moved = {
        key.removesuffix(".weight") for key, p in optimizer.model.named_parameters() if not torch.equal(p, before[key])
    }
    assert moved == set(decaying.split())


def test_a_pattern_that_matches_no_parameter_is_named():
    with pytest.raises(
        UserError, match=r"decay_filter: '-norm\*' matches no .* the model has conv1.weight, conv1.bias"
    ):
        built("thor", "decay_filter=-norm*")
    with pytest.raises(UserError, match="decay_filter=3: must be a name, a pattern"):
        built("thor", "decay_filter=3")


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
