"""Composite modules: several layers in one forward, registered by the user."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tiny import batches, train
from torch_thor import THOR, ThorMuon
from torch_thor.capture import CompositeHook, InnerLayer, register_composite
from torch_thor.capture.composites import declarations as registry
from torch_thor.curvature import ParameterView, ProjectionKind
from torch_thor.curvature.kinds import registry as kinds


@pytest.fixture(autouse=True)
def _registered_for_one_test(monkeypatch):
    monkeypatch.setattr(registry.COMPOSITES, "classes", dict(registry.COMPOSITES.classes))
    monkeypatch.setattr(kinds.KINDS, "classes", dict(kinds.KINDS.classes))


class TwoLayers(nn.Module):
    """Two linear layers in one fused weight, the second on the output of the first."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.randn(10, 5) / 2)
        self.offsets = nn.Parameter(torch.randn(10))

    def forward(self, x):
        first, second = self.fused.chunk(2)
        a, b = self.offsets.chunk(2)
        return F.linear(torch.tanh(F.linear(x, first, a)), second, b)


def layers_of(module):
    for name, rows in (("first", slice(0, 5)), ("second", slice(5, 10))):
        weight, bias = (ParameterView(module, own, rows) for own in ("fused", "offsets"))
        kind = ProjectionKind(weight.of(module.fused), "TwoLayers")
        yield InnerLayer(name, kind, weight, [bias], f"{name}_")


class LinearCalls(TorchFunctionMode):
    def __init__(self, report):
        super().__init__()
        self.report = report
        self.names = ["first", "second"]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.report(self.names.pop(0), args[0], y)
        return y


class Hook(CompositeHook):
    def mode(self, report):
        return LinearCalls(report)


def network(inner):
    return nn.Sequential(nn.Linear(5, 5), inner, nn.Linear(5, 3)).double()


def fused_and_separate():
    """The same network twice: as a composite module, and as two modules in its place."""
    register_composite(TwoLayers, layers_of, Hook)
    model = network(TwoLayers())
    parts = nn.Linear(5, 5), nn.Linear(5, 5)
    twin = network(nn.Sequential(parts[0], nn.Tanh(), parts[1]))
    with torch.no_grad():
        for i in (0, 2):
            twin[i].load_state_dict(model[i].state_dict())
        for i, linear in enumerate(parts):
            linear.weight.copy_(model[1].fused.chunk(2)[i])
            linear.bias.copy_(model[1].offsets.chunk(2)[i])
    return model, twin


CASES = {
    "paper": (THOR, {"update_interval": 3, "kl_clip": 1e-3}, None, None),
    "orthogonal": (ThorMuon, {"max_update_ratio": None}, None, None),
    "left out": (THOR, {"update_interval": 2, "max_update_ratio": None}, "-1.second", "-1.2"),
}


@pytest.mark.parametrize(("kind", "options", "layers", "its_layers"), CASES.values(), ids=CASES)
def test_it_is_trained_as_separate_layers_are(kind, options, layers, its_layers):
    """With bounds on the step that do not differ between one parameter and two."""
    model, twin = fused_and_separate()
    optimizer = kind(model, split_dim=4, layers=layers, **options)
    assert ("1.second" in optimizer.curvature) == (layers is None)
    train(model, optimizer, batches(7))
    train(twin, kind(twin, split_dim=4, layers=its_layers, **options), batches(7))
    torch.testing.assert_close(model[0].weight, twin[0].weight)
    torch.testing.assert_close(model[1].fused, torch.cat([twin[1][0].weight, twin[1][2].weight]))
    torch.testing.assert_close(model[1].offsets, torch.cat([twin[1][0].bias, twin[1][2].bias]))


def entries_of(model, **options):
    return {entry.name: entry for entry in THOR(model, **options).coverage()}


@pytest.mark.filterwarnings("ignore:THOR preconditions")
def test_coverage():
    assert entries_of(network(TwoLayers()))["1.fused"].reason == "no curvature for TwoLayers"
    register_composite(TwoLayers, layers_of, Hook)
    model = network(TwoLayers())
    entries = entries_of(model)
    for name, sizes in (("1.fused", (5, 5)), ("1.offsets", (5,))):
        entry = entries[name]
        assert (entry.kind, entry.factor_sizes, entry.groups) == ("TwoLayers", sizes, 2)
    note = entries_of(model, layers="-1.first")["1.offsets"].note
    assert note == "plain momentum for '1.first': left out by layers="


def test_what_cannot_be_registered():
    with pytest.raises(ValueError, match="LSTM is registered already"):
        register_composite(nn.LSTM, layers_of, Hook)


def test_layers_that_do_not_fit_their_module():
    def made(module):
        kind = ProjectionKind(torch.zeros(5, 5), "TwoLayers")
        yield InnerLayer("first", kind, ParameterView(module, "fused"))

    register_composite(TwoLayers, made, Hook)
    with pytest.raises(ValueError, match=r"inputs=5 of a weight of shape \(10, 5\)"):
        THOR(network(TwoLayers()))
