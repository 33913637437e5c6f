"""Wrong arguments are refused with the value and the rule; groups keep unknown keys."""

import copy
import inspect
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn

from comparing import having
from tiny import assert_same, backward, batches, mlp, train, twins, weights
from torch_thor import AGCSGD, LAMB, THOR, Distributed, ThorMuon, model_is

BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])
ALL = pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, AGCSGD])
NAN, INF = float("nan"), float("inf")
LAYERS = {"0", "2", "4"}
WRONG = {
    "lr": [-0.1, NAN, INF, "fast", torch.tensor([0.1, 0.2])],
    "damping": [0.0],
    "momentum": [1.0, -0.1],
    "nesterov": ["yes"],
    "weight_decay": [-1e-4],
    "update_interval": [0, 2.5, "epoch"],
    "trace_thresholds": [(0.001, 0.01), (0.1,), 0.01],
    "split_dim": [0, 12.5],
    "factor_decay": [1.0],
    "max_update_ratio": [0.0],
    "kl_clip": [0.0],
    "loss_reduction": ["none"],
    "fisher": ["exact"],
    "distributed": [True],
    "row_splits": [3],
    "betas": [(0.9, 1.0), 0.9],
    "eps": [0.0],
    "maximize": [1],
    "foreach": ["yes"],
    "dampening": [2],
    "dampen_first": ["yes"],
    "clip_factor": [0],
}


@ALL
def test_a_wrong_option_is_refused_with_its_value_and_the_rule(make):
    """Options of the optimizer, of a first group and of an added group are checked."""
    known, defaults = inspect.signature(make).parameters, make(mlp()).defaults
    assert known.keys() & defaults.keys() <= WRONG.keys()
    wrong = [(key, value) for key in WRONG.keys() & known.keys() for value in WRONG[key]]
    # AGCSGD has no momentum
    for name, value in [*wrong, *([("nesterov", True)] if make is AGCSGD else [])]:
        model = mlp()
        first, second = [{"params": list(model[i].parameters())} for i in (0, 2)]
        optimizer, other = make([first], model=model), {**second, name: value}
        calls = [partial(make, model, **{name: value})]
        if name in defaults:
            calls += [partial(make, [first, other], model=model)]
            calls += [partial(optimizer.add_param_group, other)]
        for call in calls:
            said = rf"^{name}={re.escape(repr(value))}: {name} must be .+"
            with pytest.raises(ValueError, match=said):
                call()
        assert len(optimizer.param_groups) == 1


@BOTH
@pytest.mark.parametrize(
    ("options", "terms", "said"),
    [
        ({}, 0, "loss_terms=0"),
        ({}, lambda: 2.5, r"loss_terms=2\.5"),
        ({"update_interval": lambda step: 0}, None, "update_interval.*0"),
    ],
)
def test_a_step_refuses_a_wrong_attribute_or_result_of_a_callable(make, options, terms, said):
    model = mlp()
    optimizer = having(make(model, **options), loss_terms=terms)
    before = weights(model)
    backward(model, batches(1)[0])
    with pytest.raises(ValueError, match=said):
        optimizer.step()
    assert_same(weights(model), before)


@BOTH
def test_parameters_need_their_model(make):
    model, stranger = mlp(), nn.Parameter(torch.ones(3))
    factory = rf"model=None.*functools\.partial\({make.__name__}, model=model\).*with torch_thor\."
    unknown = r"shape \(3,\) are not in the model"
    for error, message, params, options in (
        (TypeError, factory, mlp().parameters(), {}),
        (ValueError, "two models", mlp(), {"model": model}),
        (TypeError, r"model='mlp'.*nn\.Module", model.parameters(), {"model": "mlp"}),
        (ValueError, "empty", [], {"model": model}),
        (ValueError, unknown, [*model.parameters(), stranger], {"model": model}),
    ):
        with pytest.raises(error, match=message):
            make(params, **options)
    assert set(partial(make, model=model)(model.parameters()).curvature) == LAYERS
    assert set(make(model, model=model).curvature) == LAYERS
    optimizer = make(model)
    with pytest.raises(ValueError, match=unknown):
        optimizer.add_param_group({"params": [stranger]})
    model.append(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="no shape yet"):
        optimizer.add_param_group({"params": list(model[5].parameters())})
    assert len(optimizer.param_groups) == 1


def test_model_is_gives_all_optimizers_their_model():
    """The innermost model counts, unless an optimizer has its own; groups keep their options."""
    model, other = mlp(), mlp()
    decay = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model[2].weight]}]
    with model_is(other):
        with model_is(model):
            optimizer = THOR(decay, weight_decay=0.0)
            lamb = LAMB(model.parameters(), exclude=["0.weight"])
            agc = AGCSGD(model.parameters(), lr=0.1)
        assert ThorMuon(model).model is model
        assert ThorMuon(other.parameters()).model is other
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert (optimizer.model, set(optimizer.curvature)) == (model, {"0", "2"})
    assert (lamb.excluded, agc.excluded) == (("0.weight",), ("4.weight", "4.bias"))


@BOTH
def test_read_only_options_and_copies(make):
    optimizer = make(mlp(), distributed=Distributed())
    for name in ("model", "layers", "distributed", "loss_reduction", "fisher"):
        with pytest.raises(AttributeError):
            setattr(optimizer, name, None)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict\(\).*load"):
            copied(optimizer)


# arguments of AdamW, Muon and MindSpore, and the counterpart here, if there is any
WORDS = {"betas": "momentum", "eps": "damping", "frequency": "update_interval"}
WORDS |= dict.fromkeys(("amsgrad", "ns_steps", "fused", "foreach", "split_indices"), "")


@BOTH
@pytest.mark.parametrize("word", WORDS)
def test_an_argument_of_another_optimizer_is_answered_with_its_counterpart(word, make):
    with pytest.raises(TypeError, match=rf"(?s)\b{word}\b.*{WORDS[word]}") as caught:
        make(mlp(), **{word: 0.5})
    assert not str(caught.value).endswith(f"unexpected keyword argument {word!r}")


@ALL
def test_groups_of_sgd_and_keys_of_trainers_are_taken_and_kept(make):
    """Keys of trainers change no step."""
    model, _, twin, plain = twins(make, lr=0.1)
    kept = {"name": "head", "initial_lr": 0.1, "lr_scale": 0.5, "layers": 3}
    (sgd,) = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.1).param_groups
    plain.param_groups[0].update({key: sgd[key] for key in sgd.keys() & plain.defaults.keys()})
    optimizer = make([{**sgd, **kept}], model=model)
    assert kept.items() <= optimizer.param_groups[0].items()
    train(model, optimizer, batches(2))
    train(twin, plain, batches(2))
    assert_same(weights(model), weights(twin))
