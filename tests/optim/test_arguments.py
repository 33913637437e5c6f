"""A wrong argument is refused at once, with the value, the rule and what to do instead."""

import copy
import functools
import re

import pytest
import torch
from torch import nn

from comparing import having
from tiny import assert_same, batches, mlp, train, weights
from torch_thor import THOR

WRONG = [
    ("lr", -0.1), ("lr", float("nan")), ("lr", float("inf")), ("lr", "fast"),
    ("lr", torch.tensor([0.1, 0.2])),
    ("damping", 0.0), ("damping", -1.0), ("damping", float("nan")),
    ("momentum", 1.0), ("momentum", -0.1), ("momentum", 1.5),
    ("weight_decay", -1e-4), ("weight_decay", float("inf")),
    ("update_interval", 0), ("update_interval", -5), ("update_interval", 2.5), ("update_interval", "epoch"),
    ("update_interval", True),
    ("trace_thresholds", (0.001, 0.01)), ("trace_thresholds", (-0.1, -0.2)), ("trace_thresholds", (0.1,)),
    ("trace_thresholds", 0.01), ("trace_thresholds", (0.01, float("nan"))),
    ("split_dim", 0), ("split_dim", -128), ("split_dim", 12.5), ("split_dim", "automatic"), ("split_dim", "all"),
    ("factor_decay", 1.0), ("factor_decay", -0.5),
    ("kl_clip", 0.0), ("kl_clip", -1.0), ("kl_clip", "yes"), ("max_update_ratio", 0.0), ("max_update_ratio", "no"),
    ("loss_reduction", "none"), ("loss_reduction", None),
    ("loss_terms", 0), ("loss_terms", -3), ("loss_terms", 2.5), ("loss_terms", "tokens"),
    ("scaling", "muon"), ("scaling", 1.0), ("scaling", ["spectral"]),
    ("fisher", "exact"), ("fisher", None),
    ("nonfinite", "ignore"), ("nonfinite", None),
    ("nesterov", "yes"),
    ("decay_filter", "bias"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: str(v) if isinstance(v, str) else repr(v))
def test_wrong_argument(name, value):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        THOR(mlp(), **{name: value})
    message = str(caught.value)
    assert name in message, "the option is not named"
    assert repr(value) in message, "the value is not shown"
    remedy = message.split(repr(value), 1)[1]
    assert re.search(r"[a-z]{3,}.*\W.*(\d|[A-Za-z]{2,})", remedy), "no rule and remedy"


@pytest.mark.parametrize("scaling", [None, "spectral"])
@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("damping", 0.0), ("momentum", 1.0), ("nesterov", "yes")])
def test_a_message_recommends_the_default_of_its_form(name, value, scaling):
    default = THOR(mlp(), scaling=scaling).defaults[name]
    with pytest.raises(ValueError, match=rf"\b{re.escape(str(default))}\b"):
        THOR(mlp(), scaling=scaling, **{name: value})


def test_nesterov_without_momentum():
    with pytest.raises(ValueError, match="momentum"):
        THOR(mlp(), nesterov=True, momentum=0.0)


@pytest.mark.parametrize(
    ("name", "value"), [pair for pair in WRONG if pair[0] in ("lr", "damping", "momentum", "split_dim")]
)
def test_wrong_argument_of_one_group(name, value):
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), name: value}]
    with pytest.raises((ValueError, NotImplementedError), match=name):
        THOR(groups, model=model)


def test_wrong_argument_of_an_added_group():
    model = mlp()
    optimizer = THOR(model[0].parameters(), model=model)
    with pytest.raises(ValueError, match="damping"):
        optimizer.add_param_group({"params": model[2].parameters(), "damping": -1.0})
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.curvature) == {"0"}


def test_parameters_without_the_model():
    """Also as a factory of optimizers hands them over: it is told how to bind the model."""
    with pytest.raises(TypeError, match=r"model=None.*must know the model.*functools\.partial\(THOR, model=model\)"):
        THOR(mlp().parameters())
    model = mlp()
    assert set(functools.partial(THOR, model=model)(model.parameters(), lr=0.1).curvature) == {"0", "2", "4"}


def test_two_different_models():
    with pytest.raises(ValueError, match="model"):
        THOR(mlp(), model=mlp())


def test_model_twice_is_fine():
    model = mlp()
    assert set(THOR(model, model=model).curvature) == {"0", "2", "4"}


def test_parameter_that_is_not_in_the_model():
    model = mlp()
    with pytest.raises(ValueError, match="not in the model"):
        THOR([*model.parameters(), nn.Parameter(torch.ones(3))], model=model)


def test_added_parameter_that_is_not_in_the_model():
    model = mlp()
    optimizer = THOR(model)
    with pytest.raises(ValueError, match="not in the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1


def test_no_parameters():
    with pytest.raises(ValueError, match="empty"):
        THOR([], model=mlp())


def test_unknown_option():
    with pytest.raises(TypeError, match="frequency"):
        THOR(mlp(), frequency=100)


@pytest.mark.parametrize("terms", [0, -1, 2.5, None])
def test_wrong_number_of_loss_terms_from_a_callable(terms):
    model = mlp()
    optimizer = having(THOR(model), loss_terms=lambda: terms)
    model(torch.randn(2, 5).double()).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    if terms is None:  # "as by default"
        optimizer.step()
    else:
        with pytest.raises(ValueError, match="loss_terms"):
            optimizer.step()
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_wrong_interval_from_a_callable_changes_nothing():
    """Found out in the step that asks, before the weights move."""
    model = mlp()
    optimizer = THOR(model, update_interval=lambda step: 0)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(2, 5).double()).sum().backward()
    with pytest.raises(ValueError, match=r"update_interval.*0"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("damping", [0.0, -1.0])
def test_damping_scheduled_too_far_down(damping):
    """A schedule that ends at zero, found in the step and not as a division by zero."""
    model = mlp()
    optimizer = THOR(model)
    optimizer.param_groups[0]["damping"] = damping
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(2, 5).double()).sum().backward()
    with pytest.raises(ValueError, match="damping"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


RIGHT = [
    {"lr": 0.0}, {"lr": torch.tensor(0.1)}, {"lr": 1}, {"momentum": 0.0}, {"split_dim": None}, {"split_dim": 1},
    {"trace_thresholds": (0.0, 0.0)}, {"trace_thresholds": [0.01, 0.001]}, {"trace_thresholds": (0.5, 0.5)},
    {"update_interval": 1}, {"kl_clip": 1e-3}, {"loss_terms": 5}, {"loss_terms": None}, {"factor_decay": 0.99},
    {"weight_decay": 0}, {"damping": 1e-12}, {"nonfinite": "skip"}, {"loss_reduction": "sum"},
]  # fmt: skip


@pytest.mark.parametrize("options", RIGHT, ids=str)
def test_right_arguments(options):
    model = mlp()
    optimizer = THOR(model, **options)
    model(torch.randn(4, 5).double()).square().mean().backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "kl_clip", "ratio"),
    [
        ({}, None, 0.01),
        ({"kl_clip": None}, None, None),
        ({"kl_clip": 1e-3}, 1e-3, None),
        ({"max_update_ratio": None}, None, None),
        ({"max_update_ratio": 0.1}, None, 0.1),
        ({"kl_clip": 1e-3, "max_update_ratio": 0.1}, 1e-3, 0.1),
        ({"kl_clip": None, "max_update_ratio": 0.1}, None, 0.1),
        ({"scaling": "spectral"}, None, 0.15),
        (THOR.preset("paper"), None, None),
        (THOR.preset("thor_stop"), None, 0.01),
    ],
    ids=str,
)
def test_what_bounds_the_step(options, kl_clip, ratio):
    """A kl_clip that is given takes the place of the default bound; the paper's step has none."""
    group = THOR(mlp(), **options).param_groups[0]
    assert (group["kl_clip"], group["max_update_ratio"]) == (kl_clip, ratio)


@pytest.mark.parametrize("scaling", [None, "spectral"])
@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.0}, {"kl_clip": None}, {"kl_clip": 1e-3}, {"kl_clip": 1e-3, "max_update_ratio": 0.1}, {"lr": None}],
    ids=str,
)
@pytest.mark.parametrize("given", [{}, {"max_update_ratio": 0.01}, {"nesterov": False}], ids=str)
def test_a_group_takes_its_defaults_as_an_optimizer_does(options, given, scaling):
    """Given in a group, also in one that is added to a copy, an option has the effect that it has for the optimizer."""
    if scaling and {**given, **options}.get("kl_clip"):
        pytest.skip("is refused")
    model = mlp()
    wanted = THOR(mlp(), scaling=scaling, **{**given, **options}).param_groups[0]
    del wanted["params"]
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), **options}]
    optimizer = copy.deepcopy(THOR(groups, model=model, scaling=scaling, **given))
    optimizer.add_param_group({"params": list(optimizer.model[4].parameters()), **options})
    for group in optimizer.param_groups[1:]:
        assert {name: group[name] for name in wanted} == wanted


def test_an_added_group_that_is_refused_is_not_kept():
    model = mlp()
    optimizer = THOR(model)
    model.append(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="no shape yet"):
        optimizer.add_param_group({"params": list(model[5].parameters())})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("scaling", [None, "spectral"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("split_dim", [0, -3, 2.5, "all"])
def test_a_wrong_block_size_of_a_group_is_refused_by_the_step(split_dim, trained, scaling):
    """The forward pass before it does not fail, and nothing has changed."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    optimizer, other = (THOR(m, split_dim=4, update_interval=1, scaling=scaling) for m in (model, twin))
    stream = batches(3)
    train(model, optimizer, stream[:trained])
    train(twin, other, stream[:trained])
    optimizer.param_groups[0]["split_dim"] = split_dim
    model(stream[1][0]).sum().backward()
    with pytest.raises(ValueError, match=f"split_dim={split_dim!r}: .*whole number ≥ 1"):
        optimizer.step()
    optimizer.param_groups[0]["split_dim"] = 4
    with pytest.raises(RuntimeError, match=r"split_dim=4: .*'0'.*call zero_grad\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, stream[1:])
    train(twin, other, stream[1:])
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_a_block_size_that_is_changed_between_the_first_forward_pass_and_the_step(scaling):
    model = mlp()
    optimizer = THOR(model, split_dim=4, scaling=scaling)
    before = weights(model)
    model(batches(1)[0][0]).sum().backward()
    optimizer.param_groups[0]["split_dim"] = 2
    with pytest.raises(RuntimeError, match=r"split_dim=2: .*'0'.*call zero_grad\(\)"):
        optimizer.step()
    assert_same(before, weights(model))
    assert not optimizer.state


def test_thresholds_that_are_changed_in_place_are_checked():
    model, thresholds = mlp(), [0.01, 0.0]
    optimizer = THOR(model, trace_thresholds=thresholds)
    train(model, optimizer, batches(1))
    thresholds[1] = 0.5
    model(batches(1)[0][0]).sum().backward()
    with pytest.raises(ValueError, match=r"trace_thresholds=\[0.01, 0.5\]: .*ω2 ≤ ω1"):
        optimizer.step()


def test_presets():
    assert THOR.preset("paper")["trace_thresholds"] == THOR.preset("thor")["trace_thresholds"] == (0.01, 0.0)
    assert THOR.preset("thor_stop") == {"trace_thresholds": (0.01, 0.001)}
    THOR.preset("paper").clear()
    assert THOR.preset("paper")
