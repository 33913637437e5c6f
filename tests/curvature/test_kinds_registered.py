"""Layers of the user's own, with a kind that is registered for them: they are trained as linear
layers are.
"""

import math
from itertools import product

import pytest
import torch
from torch import nn

from comparing import having
from tiny import train
from torch_thor import THOR, ThorMuon, register_kind
from torch_thor.curvature import LinearKind
from torch_thor.curvature.kinds import kind_of, registry, why_not


@pytest.fixture(autouse=True)
def _registered_for_one_test(monkeypatch):
    monkeypatch.setattr(registry.KINDS, "classes", dict(registry.KINDS.classes))


class InOut(nn.Module):
    """A linear layer whose weight is (in, out)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 2)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class InOutKind(LinearKind):
    label, transposed = "InOut", True

    def __init__(self, module):
        self.inputs, self.outputs = module.weight.shape


class CopiedKind(InOutKind):
    """The same layer, turned before anybody sees its matrix: a copy, to be written back."""

    transposed = False

    def to_matrix(self, tensor):
        return tensor.mT[None].contiguous()

    def from_matrix_(self, matrix, tensor):
        tensor.copy_(matrix[0].mT)


class PerHead(nn.Module):
    """A projection to heads of two numbers: the weight is (in, heads, 2); no parameter has its
    usual name.
    """

    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, outputs // 2, 2) / 2)
        self.offset = nn.Parameter(torch.randn(outputs // 2, 2))

    def forward(self, tokens):
        return (torch.einsum("...i,ihs->...hs", tokens, self.kernel) + self.offset).flatten(-2)


class PerHeadKind(LinearKind):
    label, transposed = "PerHead", True

    def __init__(self, module):
        self.inputs, self.outputs = len(module.kernel), math.prod(module.kernel.shape[1:])


def network(layer):
    torch.manual_seed(4)
    return nn.Sequential(layer(5, 6), nn.Tanh(), layer(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def as_linear(model):
    """The parameters as those of linear layers."""
    found = []
    for layer in model:
        own = [p.detach() for p in layer.parameters()]
        found += (
            [own[0].flatten(1).mT, own[1].flatten()]
            if own and not isinstance(layer, nn.Linear)
            else own
        )
    return found


def twins(layer):
    """A network of such layers, and one of linear layers with the same numbers."""
    model, twin = network(layer), network(nn.Linear)
    with torch.no_grad():
        for p, value in zip(twin.parameters(), as_linear(model), strict=True):
            p.copy_(value)
    return model, twin


@pytest.fixture(params=["transposed", "copied", "heads"])
def layer(request):
    """A class of layers, whose kind is registered."""
    if request.param == "heads":
        register_kind(PerHead, PerHeadKind, weight="kernel", bias="offset")
        return PerHead
    register_kind(InOut, InOutKind if request.param == "transposed" else CopiedKind)
    return InOut


MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
CASES = [
    (THOR, {"momentum": 0.9, "nesterov": True}, None),
    (THOR, {"weight_decay": 0.01, "factor_decay": 0.5}, MASK),
    (ThorMuon, {}, MASK),
]


def test_steps_and_factors_are_those_of_linear_layers(layer):
    """Nothing but the place of the numbers is another."""
    stream = [(torch.randn(3, 4, 5).double(), torch.randint(3, (3, 4))) for _ in range(8)]
    for (method, options, mask), split_dim in product(CASES, (None, 4)):
        options = {
            "update_interval": 3,
            "split_dim": split_dim,
            "max_update_ratio": None,
            **options,
        }
        models, optimizers = twins(layer), []
        for model in models:
            optimizers.append(having(method(model, **options), row_mask=mask))
            train(model, optimizers[-1], stream)
        # polar factors are iterated to some accuracy
        accuracy = (
            {"rtol": 1e-6, "atol": 1e-8} if method is ThorMuon else {"rtol": 1e-8, "atol": 1e-10}
        )
        torch.testing.assert_close(*map(as_linear, models), **accuracy)
        for one, other in zip(
            *(optimizer.curvature.values() for optimizer in optimizers), strict=True
        ):
            assert (one.refreshes, one.rows_per_term) == (other.refreshes, other.rows_per_term)
            assert one.refreshes > 1
            torch.testing.assert_close(one.factors(), other.factors(), rtol=1e-6, atol=1e-9)


# ---- which modules -------------------------------------------------------------------------------


class Gated(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


# of two classes of one name, the one that is not registered is named with its Python module
BODY = {"__module__": "library", "forward": lambda self, x: x @ self.weight}
OTHER, OVERRIDING = type("Linear", (InOut,), BODY), type("Linear", (nn.Linear,), BODY)


def test_why_a_module_has_no_kind():
    classes = InOut, Gated, OTHER, OVERRIDING
    entries = THOR(nn.Sequential(*(c(3, 3) for c in classes), nn.Linear(9, 9))).coverage()
    assert [entry.reason for entry in entries[::2]] == [
        "no curvature for InOut",
        "Gated overrides the forward of Linear",
        "no curvature for library.Linear",
        "library.Linear overrides the forward of Linear",
        None,
    ]
    assert [entry.kind for entry in entries[4:6]] == ["library.Linear"] * 2


@pytest.mark.parametrize(
    ("base", "library"),
    [(InOut, "torch_geometric.nn.dense.linear"), (nn.Linear, "timm.layers.linear")],
)
def test_layers_of_libraries_are_known_by_their_names(base, library):
    known = type("Linear", (base,), {**BODY, "__module__": library})
    assert type(kind_of(known(2, 3))) is LinearKind


def test_which_modules():
    """Those of the class and of subclasses that run its forward; of several classes the nearest."""
    Named = type("Named", (InOut,), {})
    Doubled = type("Doubled", (InOut,), {"forward": lambda self, x: 2 * InOut.forward(self, x)})
    register_kind(Gated, LinearKind)
    register_kind(InOut, InOutKind)
    optimizer = THOR(nn.Sequential(InOut(2, 3), nn.Linear(3, 30)))
    entries = [(entry.kind, entry.factor_sizes) for entry in optimizer.coverage()[:2]]
    assert entries == [("InOut", (2, 3)), ("InOut", (3,))]
    assert "InOut" in repr(optimizer)
    assert why_not(Doubled(2, 3)) == "Doubled overrides the forward of InOut"
    assert kind_of(Doubled(2, 3)) is None
    kinds = [type(kind_of(c(2, 3))) for c in (Gated, InOut, Named)]
    assert kinds == [LinearKind, InOutKind, InOutKind]
    register_kind(Named, CopiedKind)
    assert [type(kind_of(c(2, 3))) for c in (InOut, Named)] == [InOutKind, CopiedKind]


# ---- what does not fit ---------------------------------------------------------------------------


def test_what_cannot_be_registered():
    with pytest.raises(
        TypeError, match=r"module_type=InOut\(\) must be a class of torch.nn.Module"
    ):
        register_kind(InOut(2, 3), InOutKind)
    with pytest.raises(
        ValueError, match=r"torch\.nn\.modules\.linear\.Linear is registered already"
    ):
        register_kind(nn.Linear, InOutKind)


def changed(**changes):
    sizes = {"inputs": 5, "outputs": 6, **changes}
    body = {"__init__": lambda self, module: vars(self).update(sizes)}
    return type("Changed", (InOutKind,), body)


TURNED = changed(to_matrix=lambda tensor: tensor.T[None])
WHOLE = "they must be whole numbers whose product is the weight's 30 numbers"


@pytest.mark.parametrize(
    ("kind", "names", "match"),
    [
        (changed(inputs=4), {}, rf"Changed, registered for Own, .*inputs=4 of .*: {WHOLE}"),
        (TURNED, {}, r"makes \(1, 6, 5\) of .*\(1, 5, 6\)"),
        (InOutKind, {"weight": "kernel"}, r"has the weight 'kernel', and the module has no"),
        (
            lambda module: object(),
            {},
            r"<lambda>, registered for Own, has no loss_terms, .*, label",
        ),
    ],
)
def test_a_kind_that_does_not_fit_its_module(kind, names, match):
    own = type("Own", (InOut,), {})
    register_kind(own, kind, **names)
    with pytest.raises(ValueError, match=match):
        THOR(nn.Sequential(own(5, 6), nn.Linear(6, 3)))
