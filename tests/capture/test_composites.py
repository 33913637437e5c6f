"""Composite modules: several layers in one forward, registered by the user; and the how-to page
that explains them.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tiny import batches, train, weights
from torch_thor import THOR, ThorMuon
from torch_thor.capture import CompositeHook, InnerLayer, register_composite
from torch_thor.capture.composites import declarations as registry
from torch_thor.curvature import ParameterView, ProjectionKind
from torch_thor.curvature.kinds import registry as kinds

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "register-kind.md"


@pytest.fixture(autouse=True)
def _registered_for_one_test(monkeypatch):
    monkeypatch.setattr(registry.COMPOSITES, "classes", dict(registry.COMPOSITES.classes))
    monkeypatch.setattr(kinds.KINDS, "classes", dict(kinds.KINDS.classes))


class TwoLayers(nn.Module):
    """Two linear layers in one fused weight, the second on the output of the first."""

    def __init__(self, width=5, outputs=5):
        super().__init__()
        self.fused = nn.Parameter(torch.randn(width + outputs, width, dtype=torch.float64) / 2)
        self.offsets = nn.Parameter(torch.randn(width + outputs, dtype=torch.float64))
        self.sizes = width, outputs

    def forward(self, x):
        first, second = self.fused.split(self.sizes)
        a, b = self.offsets.split(self.sizes)
        return F.linear(torch.tanh(F.linear(x, first, a)), second, b)


def layers_of(module):
    width, outputs = module.sizes
    for name, rows in (("first", slice(0, width)), ("second", slice(width, width + outputs))):
        weight, bias = (
            ParameterView(module, attribute, rows) for attribute in ("fused", "offsets")
        )
        yield InnerLayer(
            name, ProjectionKind(weight.of(module.fused), "TwoLayers"), weight, [bias], f"{name}_"
        )


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
    return nn.Sequential(
        nn.Linear(5, 5, dtype=torch.float64), inner, nn.Linear(5, 3, dtype=torch.float64)
    )


def fused_and_separate():
    """The same network twice: as a composite module, and as two modules in its place."""
    register_composite(TwoLayers, layers_of, Hook)
    model = network(TwoLayers())
    one, two = (nn.Linear(5, 5, dtype=torch.float64) for _ in range(2))
    twin = network(nn.Sequential(one, nn.Tanh(), two))
    with torch.no_grad():
        for i in (0, 2):
            twin[i].load_state_dict(model[i].state_dict())
        for i, linear in enumerate((one, two)):
            linear.weight.copy_(model[1].fused.chunk(2)[i])
            linear.bias.copy_(model[1].offsets.chunk(2)[i])
    return model, twin


CASES = {
    "paper": (THOR, {"update_interval": 3, "kl_clip": 1e-3}, [], []),
    "orthogonal": (ThorMuon, {"max_update_ratio": None}, [], []),
    "left out": (THOR, {"update_interval": 2, "max_update_ratio": None}, ["1.second"], ["1.2"]),
}


@pytest.mark.parametrize(("kind", "options", "skipped", "twins_skipped"), CASES.values(), ids=CASES)
def test_it_is_trained_as_separate_layers_are(kind, options, skipped, twins_skipped):
    """With bounds on the step that do not differ between one parameter and two."""
    model, twin = fused_and_separate()
    left_out, twins_left_out = (
        [f"-{name}" for name in names] or None for names in (skipped, twins_skipped)
    )
    optimizer = kind(model, split_dim=4, layers=left_out, **options)
    assert set(optimizer.curvature) == {"0", "1.first", "1.second", "2"} - set(skipped)
    train(model, optimizer, batches(7))
    train(twin, kind(twin, split_dim=4, layers=twins_left_out, **options), batches(7))
    torch.testing.assert_close(model[0].weight, twin[0].weight)
    torch.testing.assert_close(model[1].fused, torch.cat([twin[1][0].weight, twin[1][2].weight]))
    torch.testing.assert_close(model[1].offsets, torch.cat([twin[1][0].bias, twin[1][2].bias]))


def test_layers_that_are_rows_of_one_weight_share_the_tensors_of_g():
    """The widest of their blocks tells how many columns there are."""
    register_composite(TwoLayers, layers_of, Hook)
    model = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), TwoLayers(outputs=3))
    optimizer = THOR(model, split_dim=None)
    train(model, optimizer, batches(1))
    state, layers = (
        optimizer.state[model[1].fused],
        [optimizer.curvature[f"1.{name}"] for name in ("first", "second")],
    )
    for suffix, matrices in (
        ("", [layer.factors() for layer in layers]),
        ("_inverse", [c.inverses() for c in layers]),
    ):
        (a, wide), (own, narrow) = matrices
        assert torch.equal(state[f"first_A{suffix}"], a)
        assert torch.equal(state[f"second_A{suffix}"], own)
        assert torch.equal(state[f"G{suffix}"], torch.cat([wide, F.pad(narrow, (0, 2))]))


def entries_of(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that little of such a small model is preconditioned
        return {entry.name: entry for entry in THOR(model, **options).coverage()}


def test_coverage():
    assert entries_of(network(TwoLayers()))["1.fused"].reason == "no curvature for TwoLayers"
    register_composite(TwoLayers, layers_of, Hook)
    model = network(TwoLayers())
    model[1].extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    entries = entries_of(model)
    fused, offsets = entries["1.fused"], entries["1.offsets"]
    assert (fused.kind, fused.factor_sizes, fused.groups, fused.note) == (
        "TwoLayers",
        (5, 5),
        2,
        None,
    )
    assert (offsets.kind, offsets.factor_sizes, offsets.groups) == ("TwoLayers", (5,), 2)
    assert entries["1.extra"].reason == "belongs to no layer inside TwoLayers"
    assert (
        entries_of(model, layers="-1.first")["1.offsets"].note
        == "plain momentum for '1.first': left out by layers="
    )
    assert entries_of(model, layers="-1")["1.offsets"].reason == "left out by layers="


class Holder(nn.Module):
    """Uses the weight of a child that it does not call."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x):
        return F.linear(x, self.inner.weight, self.inner.bias)


def test_children_that_are_not_called():
    def layers(module):
        kind = ProjectionKind(module.inner.weight, "Holder")
        yield InnerLayer(
            "first",
            kind,
            ParameterView(module.inner, "weight"),
            [ParameterView(module.inner, "bias")],
        )

    for with_children, name in ((False, "1.inner"), (True, "1.first")):
        registry.COMPOSITES.classes.pop(Holder, None)
        register_composite(Holder, layers, Hook, with_children=with_children)
        model = network(Holder())
        optimizer = THOR(model)
        assert set(optimizer.curvature) == {"0", name, "2"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without: the layer is not called
            train(model, optimizer, batches(1))
        assert optimizer.curvature[name].refreshes == int(with_children)


# ---- what does not fit ---------------------------------------------------------------------------


def test_what_cannot_be_registered():
    with pytest.raises(TypeError, match=r"module_type=TwoLayers\(\) must be a class of"):
        register_composite(TwoLayers(), layers_of, Hook)
    for known in (nn.LSTM, nn.Linear):
        with pytest.raises(ValueError, match=f"{known.__name__} is registered already"):
            register_composite(known, layers_of, Hook)


def test_layers_that_do_not_fit_their_module():
    def made(module):
        kind = ProjectionKind(torch.zeros(5, 5), "TwoLayers")
        yield InnerLayer("first", kind, ParameterView(module, "fused"))

    register_composite(TwoLayers, made, Hook)
    with pytest.raises(ValueError, match=r"inputs=5 of a weight of shape \(10, 5\): .* 50 numbers"):
        THOR(network(TwoLayers()))


# ---- the page that explains it -------------------------------------------------------------------


def test_the_examples_of_the_how_to_page_run(capsys):
    """Both examples, as printed; then their model is trained, and has the factors of linear
    layers.
    """
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, names)
    assert capsys.readouterr().out == "['0', '1']\n['1', '0.up', '0.down']\n"
    optimizer = names["optimizer"]
    model, inputs = optimizer.model, []
    model[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    before = weights(model)
    train(model, optimizer, batches(1, size=12, features=16, classes=4, dtype=torch.float32))
    (x,) = inputs
    gate, value = (x @ before["0.up"].T).chunk(2, -1)
    for name, rows in (("0.up", x), ("0.down", F.silu(gate) * value)):
        assert optimizer.curvature[name].refreshes == 1
        torch.testing.assert_close(optimizer.curvature[name].factors()[0], rows.T @ rows / 12)
    assert not any(torch.equal(before[name], p) for name, p in model.named_parameters())
