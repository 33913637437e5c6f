"""A wrong argument is refused at once, with the value and the rule; unknown keys of groups stay."""

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
from torch_thor.optim.options import COUNTERS, OPTIONS, check
from torch_thor.training.optimizers import KEYS_OF

BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])
ALL = pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, AGCSGD])
NAN, INF = float("nan"), float("inf")
LAYERS = {"0", "2", "4"}
WRONG = {
    "lr": [-0.1, NAN, INF, "fast", True, torch.tensor([0.1, 0.2])],
    "damping": [0.0, NAN],
    "momentum": [1.0, -0.1],
    "nesterov": ["yes", 1],
    "weight_decay": [-1e-4, INF],
    "update_interval": [0, 2.5, "epoch", True],
    "trace_thresholds": [(0.001, 0.01), (-0.1, -0.2), (0.1,), 0.01, (0.01, NAN)],
    "split_dim": [0, 12.5, "auto"],
    "factor_decay": [1.0, -0.5],
    "max_update_ratio": [0.0, "no"],
    "kl_clip": [0.0, "yes"],
    "loss_reduction": ["none", None],
    "fisher": ["exact"],
    "distributed": [True],
    "row_splits": [3],
    "betas": [(0.9, 1.0), (-0.1, 0.9), 0.9, (0.9,), ("a", 0.9)],
    "eps": [0.0],
    "maximize": [1],
    "foreach": ["yes"],
    "dampening": [2],
    "dampen_first": ["yes"],
    "clip_factor": [0],
}


@ALL
def test_wrong_option(make):
    """Of the optimizer, of one group and of an added group: the message has value and rule."""
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
        ({}, "tokens", "loss_terms='tokens'"),
        ({}, lambda: 2.5, r"loss_terms=2\.5"),
        ({"update_interval": lambda step: 0}, None, "update_interval.*0"),
    ],
)
def test_wrong_attribute_or_answer_of_a_callable_is_refused_by_the_step(make, options, terms, said):
    model = mlp()
    optimizer = having(make(model, **options), loss_terms=terms)
    before = weights(model)
    backward(model, batches(1)[0])
    with pytest.raises(ValueError, match=said):
        optimizer.step()
    assert_same(weights(model), before)


@BOTH
def test_model_and_parameters(make):
    """Parameters need the model, also those that a factory of optimizers hands over."""
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


def test_model_is_names_the_model_of_all_optimizers():
    """The innermost, unless an optimizer is given its own; decay groups of a trainer are kept."""
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


class Anew(nn.Module):
    """Makes its frozen weight anew whenever it is read, as an adapter of peft does."""

    def __init__(self):
        super().__init__()
        self.inside, self.head = nn.Linear(5, 5).double(), nn.Linear(5, 3).double()

    def named_parameters(self, *args, **options):
        for name, p in super().named_parameters(*args, **options):
            yield name, nn.Parameter(p.detach(), requires_grad=False) if "inside" in name else p

    def forward(self, x):
        return self.head(self.inside(x))


@ALL
def test_parameters_that_are_other_objects_whenever_they_are_read(make):
    model = Anew()
    if make in (THOR, ThorMuon):
        with pytest.raises(ValueError, match=r"inside\.weight.*peft.*leave the module out"):
            make(model)
        return
    optimizer, before = make(model), model.head.weight.detach().clone()
    train(model, optimizer, batches(1))
    assert not model.head.weight.equal(before)


@BOTH
def test_read_only_options_and_copies(make):
    optimizer = make(mlp(), distributed=Distributed())
    for name in ("model", "layers", "distributed", "loss_reduction", "fisher"):
        with pytest.raises(AttributeError):
            setattr(optimizer, name, None)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict\(\).*load"):
            copied(optimizer)


# what users of AdamW, Muon and MindSpore type, and our word for it, where there is one
WORDS = {"betas": "momentum", "eps": "damping", "frequency": "update_interval"}
WORDS |= dict.fromkeys(("amsgrad", "ns_steps", "fused", "foreach", "split_indices"), "")


@BOTH
@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_another_optimizer_is_answered_with_ours(word, make):
    with pytest.raises(TypeError, match=rf"(?s)\b{word}\b.*{WORDS[word]}") as caught:
        make(mlp(), **{word: 0.5})
    assert not str(caught.value).endswith(f"unexpected keyword argument {word!r}")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dampign'"):
        make(mlp(), dampign=1)


@ALL
def test_the_keys_of_trainers_stay_and_groups_of_sgd_are_taken(make):
    """As torch's optimizers keep them; the step is that without them."""
    model, _, twin, plain = twins(make, lr=0.1)
    kept = {"name": "head", "initial_lr": 0.1, "lr_scale": 0.5, "layers": 3}
    (sgd,) = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.1).param_groups
    plain.param_groups[0].update({key: sgd[key] for key in sgd.keys() & plain.defaults.keys()})
    optimizer = make([{**sgd, **kept}], model=model)
    assert kept.items() <= optimizer.param_groups[0].items()
    for one, its in ((model, optimizer), (twin, plain)):
        train(one, its, batches(2))
    assert_same(weights(model), weights(twin))


@ALL
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
