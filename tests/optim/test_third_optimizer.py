"""Another optimizer needs a class with its options and its step, and a line in a registry."""

from third_optimizer import NaturalSGD
from tiny import batches, mlp, train, twins, weights
from torch_thor import THOR
from torch_thor.training import optimizers

AS_THOR = {"trace_thresholds": (0.01, 0.0), "momentum": 0.0, "max_update_ratio": None}


def test_it_is_thor_without_momentum_and_bound():
    model, optimizer, twin, _ = twins(NaturalSGD)
    group = optimizer.param_groups[0]
    options = {name: group[name] for name in ("lr", "damping", "update_interval", "split_dim")}
    train(model, optimizer, batches(8))
    train(twin, THOR(twin, **options, **AS_THOR), batches(8))
    for name, weight in weights(model).items():
        assert (weight - weights(twin)[name]).abs().max() < 1e-12
    assert group.keys() == {"params", *options, "step", "next_refresh", "last_loss_terms"}
    assert [layer.refreshes for layer in optimizer.curvature.values()] == [3, 3, 3]


def test_a_line_in_the_registry_makes_it_an_optimizer_of_recipes(monkeypatch):
    monkeypatch.setitem(optimizers.OPTIMIZERS, "ngd", NaturalSGD)
    monkeypatch.setitem(optimizers.KEYS_OF, "ngd", optimizers.keys_of("ngd"))
    defaults = {"lr": 0.02, "damping": 0.05, "update_interval": 3, "split_dim": 8, "layers": None}
    assert defaults.items() <= optimizers.settings_of("ngd").items()
    made = optimizers.build_optimizer("ngd", mlp(), {"lr": 0.1, "layers": "0"})
    assert type(made) is NaturalSGD
    assert [*made.curvature] == ["0"]
