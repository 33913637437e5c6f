"""A wrong argument is refused at once, with the value, the rule and what to do instead."""

import copy
import functools
import inspect
import pickle
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from comparing import having
from tiny import assert_same, backward, batches, mlp, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon, model_is

BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])
NAN, INF = float("nan"), float("inf")
WRONG = {
    "lr": [-0.1, NAN, INF, "fast", True, torch.tensor([0.1, 0.2])],
    "auto_lr": ["yes", 1],
    "damping": [0.0, -1.0, NAN],
    "momentum": [1.0, -0.1, 1.5],
    "nesterov": ["yes", 1],
    "weight_decay": [-1e-4, INF],
    "update_interval": [0, -5, 2.5, "epoch", True],
    "trace_thresholds": [(0.001, 0.01), (-0.1, -0.2), (0.1,), 0.01, (0.01, NAN)],
    "split_dim": [0, -128, 12.5, "auto"],
    "factor_decay": [1.0, -0.5],
    "max_update_ratio": [0.0, "no"],
    "kl_clip": [0.0, -1.0, "yes"],
    "loss_reduction": ["none", None],
    "fisher": ["exact", None],
    "betas": [(0.9, 1.0), (-0.1, 0.9), 0.9, (0.9,), ("a", 0.9), (NAN, 0.9)],
    "eps": [0.0],
    "maximize": [1],
    "foreach": ["yes"],
    "dampening": [2],
    "dampen_first": ["yes"],
    "clip_factor": [0],
}


def refused(name, value, call, *args, **kwargs):
    """The call is refused with a message of value, rule and remedy; returns the remedy."""
    with pytest.raises(ValueError, match=name) as caught:
        call(*args, **kwargs)
    before, _, rest = str(caught.value).partition(f"{name}={value!r}: {name} must be ")
    rule, _, remedy = rest.partition("; ")
    assert not before
    assert rule
    assert re.search(r"[a-z0-9]{3,}", remedy)
    return remedy


def assert_step_is_refused(optimizer, name, value):
    before = weights(optimizer.model)
    backward(optimizer.model, batches(1)[0])
    refused(name, value, optimizer.step)
    assert_same(weights(optimizer.model), before)
    assert not optimizer.state


def usual(make, name):
    """What to start from: ThorMuon's lr, which it finds itself as a rule, is that from scratch."""
    default = inspect.signature(make).parameters[name].default
    return 0.08 if default is None else default


@pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, AGCSGD])
def test_wrong_option(make):
    """Of the optimizer, of one group, of an added group and of a group between two steps."""
    known, defaults = inspect.signature(make).parameters, make(mlp()).defaults
    assert defaults.keys() <= WRONG.keys() | {"step", "next_refresh", "last_loss_terms"}
    wrong = [(key, value) for key in WRONG.keys() & known.keys() for value in WRONG[key]]
    # which has no momentum
    for name, value in [*wrong, *([("nesterov", True)] if make is AGCSGD else [])]:
        model = mlp()
        remedy = refused(name, value, make, model, **{name: value})
        if make in (THOR, ThorMuon) and name in ("lr", "damping", "momentum", "nesterov"):
            assert str(usual(make, name)) in remedy
        if name not in defaults:
            continue
        first, second = [{"params": list(model[i].parameters())} for i in (0, 2)]
        refused(name, value, make, [first, {**second, name: value}], model=model)
        optimizer = make([first], model=model)
        refused(name, value, optimizer.add_param_group, {**second, name: value})
        assert len(optimizer.param_groups) == 1
        if make in (THOR, ThorMuon):
            assert all(
                entry.trained == entry.name.startswith("0") for entry in optimizer.coverage()
            )
            if not isinstance(value, str | torch.Tensor):
                optimizer.param_groups[0][name] = value
                assert_step_is_refused(optimizer, name, value)


@BOTH
def test_wrong_attribute_or_answer_of_a_callable_is_refused_by_the_step(make):
    for given, shown in (
        (0, 0),
        (-3, -3),
        (2.5, 2.5),
        ("tokens", "tokens"),
        (lambda: 0, 0),
        (lambda: 2.5, 2.5),
    ):
        assert_step_is_refused(having(make(mlp()), loss_terms=given), "loss_terms", shown)
    for given in ("ignore", None):
        assert_step_is_refused(having(make(mlp()), nonfinite=given), "nonfinite", given)
    for name, value, change, wrong in (  # options that are changed in place
        ("damping", torch.tensor(0.1), lambda value: value.zero_(), torch.tensor(0.0)),
        *(
            [("trace_thresholds", [0.01, 0.0], lambda value: value.reverse(), [0.0, 0.01])]
            if make is THOR
            else []
        ),
    ):
        optimizer = make(mlp(), **{name: value})
        change(optimizer.param_groups[0][name])
        assert_step_is_refused(optimizer, name, wrong)
    optimizer = make(mlp(), update_interval=lambda step: 0)
    before = weights(optimizer.model)
    backward(optimizer.model, batches(1)[0])
    with pytest.raises(ValueError, match=r"update_interval.*0"):
        optimizer.step()
    assert_same(weights(optimizer.model), before)


@BOTH
def test_model_and_parameters(make):
    """Parameters need the model, also as a factory of optimizers hands them over; both must fit
    together.
    """
    model, stranger = mlp(), nn.Parameter(torch.ones(3))
    factory = (
        rf"model=None.*must know the model.*functools\.partial\({make.__name__}, model=model\)"
    )
    for error, message, params, options in (
        (TypeError, factory, mlp().parameters(), {}),
        (ValueError, "two models", mlp(), {"model": model}),
        (TypeError, r"model='mlp'.*nn\.Module", model.parameters(), {"model": "mlp"}),
        (
            TypeError,
            r"distributed=True: distributed must be a torch_thor\.Distributed",
            model,
            {"distributed": True},
        ),
        (ValueError, "empty", [], {"model": model}),
        (
            ValueError,
            r"shape \(3,\) are not in the model",
            [*model.parameters(), stranger],
            {"model": model},
        ),
    ):
        with pytest.raises(error, match=message):
            make(params, **options)
    assert set(functools.partial(make, model=model)(model.parameters(), lr=0.1).curvature) == {
        "0",
        "2",
        "4",
    }
    assert set(make(model, model=model).curvature) == {"0", "2", "4"}
    with model_is(stranger_model := mlp()):
        with model_is(model):  # decay groups that a trainer makes are kept
            groups = [
                {"params": [model[0].weight], "weight_decay": 0.1},
                {"params": [model[2].weight]},
            ]
            optimizer = make(groups, weight_decay=0.0)
        assert make(model).model is model  # its own counts more
        assert make(stranger_model.parameters()).model is stranger_model
        with pytest.raises(ValueError, match="are not in the model"):
            make(model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert (optimizer.model, set(optimizer.curvature)) == (model, {"0", "2"})
    for given in ({}, {"model": None}):
        with pytest.raises(
            TypeError, match=r"let it run inside `with torch_thor\.model_is\(model\):`"
        ):
            make(model.parameters(), **given)
    with (
        pytest.raises(TypeError, match=r"model_is\(list\): must be the nn\.Module"),
        model_is([model]),
    ):
        pass
    optimizer = make(model)
    with pytest.raises(ValueError, match=r"shape \(3,\) are not in the model"):
        optimizer.add_param_group({"params": [stranger]})
    model.append(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="no shape yet"):
        optimizer.add_param_group({"params": list(model[5].parameters())})
    assert len(optimizer.param_groups) == 1


def test_model_is_names_the_model_of_all_optimizers():
    model = mlp()
    with model_is(model):
        lamb = LAMB(model.parameters(), exclude=["0.weight"])
        agc = AGCSGD(model.parameters(), lr=0.1)
    assert (lamb.excluded, agc.excluded) == (("0.weight",), ("4.weight", "4.bias"))
    with pytest.raises(TypeError, match="model=None: AGC leaves the last"):
        AGCSGD(model.parameters(), lr=0.1)


class Anew(nn.Module):
    """Makes its frozen weight anew whenever it is read, as an adapter of peft does."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(5, 5).double()

    def named_parameters(self, *args, **options):
        for name, p in super().named_parameters(*args, **options):
            yield name, nn.Parameter(p.detach(), requires_grad=False) if "inside" in name else p


class OfAnew(Anew):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3).double()

    def forward(self, x):
        return self.head(self.inside(x))


@pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, partial(AGCSGD, lr=0.1)])
def test_parameters_that_are_other_objects_whenever_they_are_read(make):
    model = OfAnew()
    if make in (THOR, ThorMuon):
        said = r"inside\.weight.*other objects whenever they are read.*peft.*leave the module out"
        with pytest.raises(ValueError, match=said):
            make(model)
        return
    optimizer, before = make(model), model.head.weight.detach().clone()
    backward(model, batches(1)[0])
    optimizer.step()
    assert not model.head.weight.equal(before)


@BOTH
def test_read_only_options_and_copies(make):
    optimizer = make(mlp())
    for name in ("model", "layers", "distributed", "loss_reduction", "fisher"):
        with pytest.raises(AttributeError):
            setattr(optimizer, name, None)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError,
            match=rf"{make.__name__} cannot be copied or pickled.*state_dict\(\).*load it",
        ):
            copied(optimizer)


def test_presets_and_the_bound_of_each():
    assert (
        THOR(mlp()).defaults["max_update_ratio"],
        ThorMuon(mlp()).defaults["max_update_ratio"],
    ) == (0.01, 0.15)
    assert THOR.preset("paper")["max_update_ratio"] is None
    assert THOR.preset("paper")["trace_thresholds"] == THOR.preset("thor")["trace_thresholds"]
    THOR.preset("paper").clear()
    assert THOR.preset("paper")


def test_the_error_for_a_missing_model_has_the_line_for_the_trainer_that_calls():
    code = "def make(kind, parameters):\n    return kind(parameters)"
    for trainer, line in (
        ("transformers.trainer", r"in transformers: .*optimizers=\(ThorMuon\(model\), None\)"),
        ("lightning.pytorch.core", r"return ThorMuon\(self\) from configure_optimizers"),
        ("fastai.optimizer", r"opt=partial\(ThorMuon, model=model\)"),
        (
            "stable_baselines3.common.policies",
            r"agent\.policy\.optimizer = ThorMuon\(agent\.policy\)",
        ),
        ("timm.optim", r"`with torch_thor\.model_is\(model\):` around create_optimizer_v2"),
        ("mine", r"give it functools\.partial\(ThorMuon, model=model\)"),
    ):
        names = {"__name__": trainer}
        exec(code, names)
        with pytest.raises(TypeError, match=f"model=None: .*{line}"):
            names["make"](ThorMuon, mlp().parameters())


def test_a_learning_rate_for_another_optimizer_is_named_once():
    """That of the groups, or the highest one of a scheduler; not one that grows, and not THOR's."""
    for change, expected in (
        (lambda group, step: group.update(lr=3e-4), 1),  # as Stable-Baselines3 does
        (lambda group, step: group.update(lr=1e-4 * step), 0),  # a warm-up
        (lambda group, step: group.update(lr=0.0), 0),
        (lambda group, step: group.update(lr=1e-4, initial_lr=0.08), 0),
        (lambda group, step: group.update(lr=1e-5 * step, initial_lr=1e-3), 1),
        (lambda group, step: group.update(lr=0.8), 0),
        (lambda group, step: group.update(lr=1.0), 1),
        (lambda group, step: None, 0),
    ):
        for make in (ThorMuon, THOR):
            model = mlp()
            optimizer = make(model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(12):
                    change(optimizer.param_groups[0], step)
                    model(torch.ones(2, 5, dtype=torch.float64)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            said = [str(one.message) for one in caught if "new networks" in str(one.message)]
            assert len(said) == (expected if make is ThorMuon else 0)
            above, below = "lr=1 is above 0.8,", "leave lr out, or start with learning_rate=0.08"
            assert all(above in one or ("is below 0.008," in one and below in one) for one in said)
