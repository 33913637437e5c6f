"""Another optimizer is a class with its options, its step and a line in a registry."""

import copy

import pytest

from third_optimizer import NaturalSGD
from tiny import assert_same, batches, mlp, train, twins, weights
from torch_thor import THOR
from torch_thor.training import optimizers

AS_THOR = {"trace_thresholds": (0.01, 0.0), "momentum": 0.0, "max_update_ratio": None}


def test_it_is_thor_without_momentum_and_bound():
    model, optimizer, twin, _ = twins(NaturalSGD)
    group = optimizer.param_groups[0]
    options = {name: group[name] for name in ("lr", "damping", "update_interval", "split_dim")}
    for one, its in ((model, optimizer), (twin, THOR(twin, **options, **AS_THOR))):
        train(one, its, batches(8))
    for name, weight in weights(model).items():
        assert (weight - weights(twin)[name]).abs().max() < 1e-12
    assert group.keys() == {"params", *options, "step", "next_refresh", "last_loss_terms"}
    assert [layer.refreshes for layer in optimizer.curvature.values()] == [3, 3, 3]


@pytest.mark.parametrize("at", [0, 4, 6])
def test_it_resumes_bit_for_bit(at):
    model, optimizer, twin, _ = twins(NaturalSGD)
    train(model, optimizer, batches(10)[:at])
    twin.load_state_dict(model.state_dict())
    resumed = NaturalSGD(twin)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((model, optimizer), (twin, resumed)):
        train(one, its, batches(10)[at:])
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict(), resumed.state_dict())


def test_it_says_its_name_and_what_is_wrong():
    with pytest.raises(ValueError, match=r"^damping=0: damping must be "):
        NaturalSGD(mlp(), damping=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentum'"):
        NaturalSGD(mlp(), momentum=0.9)
    assert str(NaturalSGD(mlp())).startswith("NaturalSGD (")


def test_a_line_in_the_registry_makes_it_an_optimizer_of_recipes(monkeypatch):
    monkeypatch.setitem(optimizers.OPTIMIZERS, "ngd", NaturalSGD)
    monkeypatch.setitem(optimizers.KEYS_OF, "ngd", optimizers.keys_of("ngd"))
    defaults = {"lr": 0.02, "damping": 0.05, "update_interval": 3, "split_dim": 8, "layers": None}
    assert defaults.items() <= optimizers.settings_of("ngd").items()
    made = optimizers.build_optimizer("ngd", mlp(), {"lr": 0.1, "layers": "0"})
    assert type(made) is NaturalSGD
    assert [*made.curvature] == ["0"]
