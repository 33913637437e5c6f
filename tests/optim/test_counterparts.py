"""An option of another optimizer is refused with its counterpart; other keys of groups are kept."""

import inspect

import pytest
import torch
from torch import nn

from tiny import assert_same, mlp, twins, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon
from torch_thor.optim import counterparts

ALL = pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, AGCSGD])
SAID = {  # what stands in the place of an option
    "betas": {THOR: "momentum= is β1", ThorMuon: "momentum= is β1", AGCSGD: "momentum= is β1"},
    "eps": {THOR: "damping= stands in its place", ThorMuon: "damping= stands in its place"},
    "ns_steps": {
        THOR: "torch_thor.ThorMuon does",
        ThorMuon: "none is needed: the polar factors are exact on a CPU",
        LAMB: "torch_thor.ThorMuon and THOR have",
        AGCSGD: "torch_thor.ThorMuon and THOR have",
    },
    "momentum": {LAMB: "betas= has it as β1"},
    "rho": dict.fromkeys((THOR, ThorMuon, LAMB, AGCSGD), "it has no counterpart: SAM"),
    "fused": dict.fromkeys((THOR, ThorMuon, LAMB, AGCSGD), "none is needed: the kernels follow"),
    "amsgrad": dict.fromkeys((THOR, ThorMuon, LAMB, AGCSGD), "it has no counterpart"),
    "precondition_frequency": dict.fromkeys((THOR, ThorMuon), "update_interval="),
    "damping": dict.fromkeys((LAMB, AGCSGD), "torch_thor.ThorMuon and THOR have"),
    "kl_clip": {ThorMuon: "max_update_ratio="},
}


@pytest.mark.parametrize("name", SAID)
def test_keywords_and_groups(name):
    """Of a class, of a subclass that hands its keywords on, of a group and of an added one."""
    for make, text in SAID[name].items():

        class Own(make):
            def __init__(self, params, **options):
                super().__init__(params, **options)

        model = mlp()
        for kind in (make, Own):
            message = rf"^{name}=0\.5: {kind.__name__} has no option {name}; .*{text}"
            with pytest.raises(TypeError, match=message):
                kind(model, **{name: 0.5})
            group = {"params": list(model[2].parameters()), name: 0.5}
            with pytest.raises(ValueError, match=message):
                kind([group], model=model)
            optimizer = kind([{"params": list(model[0].parameters())}], model=model)
            with pytest.raises(ValueError, match=message):
                optimizer.add_param_group(group)
            assert len(optimizer.param_groups) == 1


def test_all_are_named_at_once():
    with pytest.raises(TypeError, match=r"^betas=1: .*; and eps=2: .*damping="):
        THOR(mlp(), betas=1, eps=2)


@ALL
def test_the_options_of_torchs_optimizers_have_a_counterpart(make):
    own = inspect.signature(make).parameters.keys()
    for other in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon, THOR, LAMB, AGCSGD):
        foreign = inspect.signature(other).parameters.keys() - own
        assert foreign <= make.counterparts.keys()
    assert own.isdisjoint(make.counterparts)


@ALL
def test_a_keyword_that_nobody_has_is_pythons_error(make):
    with pytest.raises(
        TypeError, match=r"__init__\(\) got an unexpected keyword argument 'dampign'"
    ):
        make(mlp(), dampign=1)


@ALL
def test_the_keys_of_trainers_and_what_is_off_stay(make):
    """As torch's optimizers keep them; the step is that without them."""
    kept = {"name": "head", "initial_lr": 0.1, "lr_scale": 0.5, "swa_lr": 0.05, "layers": 3}
    kept |= {"fused": None, "amsgrad": False, "capturable": False, "differentiable": False}
    model, _, twin, plain = twins(make, lr=0.1)
    optimizer = make([{"params": model.parameters(), **kept}], model=model, lr=0.1)
    assert kept.items() <= optimizer.param_groups[0].items()
    for one, its in ((model, optimizer), (twin, plain)):
        one(torch.ones(2, 5, dtype=torch.float64)).square().mean().backward()
        its.step()
    assert_same(weights(model), weights(twin))


def test_groups_of_sgd_are_taken_and_those_of_muon_with_adamw_refused():
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    assert THOR(sgd.param_groups, model=model).param_groups[0]["momentum"] == 0.5
    for use_muon in (True, False):
        with pytest.raises(ValueError, match=r'use_muon=.*layers="-NAME" gives a layer to AdamW'):
            ThorMuon([{"params": model.parameters(), "use_muon": use_muon}], model=model)


def test_a_subclass_may_have_the_option():
    class WithEps(ThorMuon):
        def __init__(self, params, eps=1e-8, **options):
            super().__init__(params, **options)
            self.eps = eps

    assert WithEps(nn.Linear(3, 3), eps=0.1).eps == 0.1


def test_signatures_are_those_of_the_classes():
    """Editors and `training.optimizers` read them."""
    assert list(inspect.signature(ThorMuon).parameters)[:3] == ["params", "lr", "damping"]
    assert counterparts.refused(ThorMuon, {"lr": 1.0}) == ""
