"""One contract for every optimizer that a recipe can name; torch is the oracle of its classes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from fake_times import fake_times
from tiny import assert_same
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon
from torch_thor.training.models.library import build_model
from torch_thor.training.muon import MuonAdamW
from torch_thor.training.optimizers import OPTIMIZERS, build_optimizer, measured_split_dim
from torch_thor.training.recipes import load_recipe

SGD, Adagrad, RMSprop = torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop
Adadelta, Adam, AdamW = torch.optim.Adadelta, torch.optim.Adam, torch.optim.AdamW
BETAS = {"beta1": 0.5, "beta2": 0.7, "eps": 1e-3, "amsgrad": True}

# name: (torch's class, its arguments by default, other settings)
OWN = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5, "nesterov": True}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5, "dampening": 0.2}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"momentum": 0.5}),
    "adagrad": (Adagrad, {}, {"lr_decay": 0.2, "initial_accumulator_value": 0.4, "eps": 1e-3}),
    "rmsprop": (RMSprop, {}, {"alpha": 0.5, "eps": 1e-3, "momentum": 0.6, "centered": True}),
    "adadelta": (Adadelta, {}, {"rho": 0.5, "eps": 1e-3}),
    "adam": (Adam, {}, BETAS),
    "adamw": (AdamW, {}, BETAS),
}


def net():
    torch.manual_seed(3)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers)


def go(model, optimizer, steps):
    losses = []
    for step in steps:
        images = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(step))
        labels = images.mean(dim=(1, 2, 3)).mul(8).round().clamp(-1, 1).add(1).long()
        loss = functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OWN)
def test_an_optimizer_of_torch_takes_torchs_steps_to_the_bit(name):
    kind, default, changed = OWN[name]
    other = {"lr": 0.3, "weight_decay": 0.1, **changed}
    arguments = {**default, **other}
    if "beta1" in arguments:
        arguments["betas"] = (arguments.pop("beta1"), arguments.pop("beta2"))
    for given, its in (({}, default), (other, arguments)):
        model, twin = net(), net()
        ours, theirs = build_optimizer(name, model, given), kind(twin.parameters(), **its)
        assert type(ours) is kind
        assert ours.defaults == theirs.defaults
        assert go(model, ours, range(4)) == go(twin, theirs, range(4))
        assert_same(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_goes_on_from_its_state(name):
    model = net()
    optimizer = build_optimizer(name, model, {"lr": 0.01})
    go(model, optimizer, range(25))
    twin = copy.deepcopy(model)
    other = build_optimizer(name, twin, {})
    # torch's loading shares tensors
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert go(model, optimizer, range(25, 28)) == go(twin, other, range(25, 28))
    assert_same(model.state_dict(), twin.state_dict())


def built(name, *words):
    recipe = load_recipe("digits", [f"optimizer={name}", "optimizers={}", *words])
    model = build_model("small-cnn", 1, 10)
    optimizer = build_optimizer(name, model, recipe.optimizers.get(name, {}))
    optimizer.network = model
    return optimizer


@pytest.mark.parametrize(
    ("name", "kind", "words", "expected"),
    [
        ("agc-sgd", AGCSGD, ["clip_factor=0.04"], {"clip_factor": 0.04, "momentum": 0.9}),
        ("lamb", LAMB, ["beta1=0.8"], {"lr": 0.01, "betas": (0.8, 0.999), "eps": 1e-6}),
        ("thor", THOR, ["trace_thresholds=thor_nt"], {"trace_thresholds": (0, 0)}),
        ("thor-muon", ThorMuon, ["split_dim=null"], {"split_dim": None, "momentum": 0.8}),
        ("muon", MuonAdamW, ["nesterov=false"], {"nesterov": False, "weight_decay": 0.01}),
    ],
)
def test_settings_reach_the_groups(name, kind, words, expected):
    optimizer = built(name, *words)
    assert isinstance(optimizer, kind)
    assert expected.items() <= optimizer.param_groups[0].items()


def test_options_that_are_no_numbers_reach_the_optimizer():
    interval = "update_interval={kind: geometric, first: 2, last: 9, factor: 2}"
    group = built("thor", interval).param_groups[0]
    assert [group["update_interval"](step) for step in (0, 2, 100)] == [2, 4, 9]
    assert built("thor", "fisher=sampled").fisher == "sampled"
    excluded = built("lamb", "exclude=[head, '*2.bias']").excluded
    assert excluded == ("conv2.bias", "head.weight", "head.bias")
    assert set(built("thor", "layers='-head'").curvature) == {"conv1", "conv2", "hidden"}


@pytest.mark.parametrize("name", ["thor", "sgd", "adamw", "muon"])
@pytest.mark.parametrize(
    ("patterns", "decaying"),
    [
        ("null", "conv1 conv1.bias conv2 conv2.bias hidden hidden.bias head head.bias"),
        ("[conv1, hidden, '-*.bias']", "conv1 hidden"),
    ],
)
def test_patterns_say_what_decays(name, patterns, decaying):
    """With all gradients 0, a step is weight decay."""
    extra = [] if name == "adamw" else ["momentum=0.0", "nesterov=false"]
    optimizer = built(name, "lr=0.1", "weight_decay=0.5", f"decay_filter={patterns}", *extra)
    before = {key: p.detach().clone() for key, p in optimizer.network.named_parameters()}
    optimizer.network(torch.zeros(2, 1, 8, 8)).sum().mul(0).backward()
    optimizer.step()
    moved = {
        key.removesuffix(".weight")
        for key, p in optimizer.network.named_parameters()
        if not torch.equal(p, before[key])
    }
    # AdamW's half of Muon never decays
    assert moved == {key for key in decaying.split() if name != "muon" or not key.endswith("bias")}


def test_the_split_dimension_is_measured_where_the_recipe_says_auto():
    model, images, labels = net(), torch.randn(24, 1, 6, 6), torch.randint(3, (24,))
    before, found = copy.deepcopy(model.state_dict()), []

    def sample():
        return measured_split_dim(model, lambda m: functional.cross_entropy(m(images), labels))

    for size in (16, 64):  # up to this size, inversions take no time
        with fake_times(lambda _, dims, size=size, **__: [1e-3 + 100 * (n > size) for n in dims]):
            optimizer = build_optimizer("thor", model, {"split_dim": "auto"}, sample=sample)
        found.append(optimizer.param_groups[0]["split_dim"])
    assert found[0] in (1, 16, 32)
    assert found[0] < found[1]
    assert_same(model.state_dict(), before)


def test_muon_takes_torchs_steps_on_matrices_and_adamws_on_the_rest():
    conv, still = nn.Conv2d(4, 6, 3), nn.Parameter(torch.ones(2, 2))
    matrix, bias = (
        nn.Parameter(p.detach().flatten(1).clone()) for p in (conv.weight, conv.bias[None])
    )
    ours = MuonAdamW([*conv.parameters(), still], lr=0.02, adamw_lr=0.003)
    muon = torch.optim.Muon([matrix], lr=0.02, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([bias], lr=0.003, weight_decay=0.0)
    for _ in range(5):
        for p in conv.parameters():
            p.grad = torch.randn_like(p)
        matrix.grad, bias.grad = conv.weight.grad.flatten(1).clone(), conv.bias.grad[None].clone()
        for optimizer in (ours, muon, adamw):
            optimizer.step()
    assert torch.equal(conv.weight.flatten(1), matrix)
    assert torch.equal(conv.bias[None], bias)
    assert torch.equal(still, torch.ones(2, 2))  # it had no gradient


def test_muon_can_leave_embeddings_to_adamw():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    net[1].weight = net[0].weight  # tied, as in language models
    for given, expected in (
        ({"adamw_embeddings": True}, [("adamw", net[0].weight), ("adamw", net[1].bias)]),
        ({}, [("muon", net[0].weight), ("adamw", net[1].bias)]),
    ):
        groups = MuonAdamW(net, lr=0.02, **given).param_groups
        found = [(group["algorithm"], p) for group in groups for p in group["params"]]
        assert [(kind, id(p)) for kind, p in found] == [(kind, id(p)) for kind, p in expected]
