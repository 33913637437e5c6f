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
from torch_thor.curvature import LinearKind, MatrixWeight
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


class TurnedKind(InOutKind):
    """The same layer, turned before anybody sees its matrix: a view that is not contiguous."""

    transposed = False

    def to_matrix(self, tensor):
        return tensor.mT[None]


class CopiedKind(TurnedKind):
    """And as a copy, which has to be written back."""

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


@pytest.fixture(params=["transposed", "turned", "copied", "heads"])
def layer(request):
    """A class of layers, whose kind is registered."""
    kinds = {"transposed": InOutKind, "turned": TurnedKind, "copied": CopiedKind}
    if request.param in kinds:
        register_kind(InOut, kinds[request.param])
        return InOut
    register_kind(PerHead, PerHeadKind, weight="kernel", bias="offset")
    return PerHead


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


def test_which_modules():
    """Those of the class and of subclasses that run its forward; of several classes the nearest."""
    Named = type("Named", (InOut,), {})
    Doubled = type("Doubled", (InOut,), {"forward": lambda self, x: 2 * InOut.forward(self, x)})
    Gated = type(
        "Gated", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x).tanh()}
    )
    # of two classes of one name, that which is not registered is named with its Python module
    body = {"__module__": "library", "forward": lambda self, x: x @ self.weight}
    Other, Overriding = type("Linear", (InOut,), body), type("Linear", (nn.Linear,), body)
    classes = InOut, Gated, Other, Overriding
    entries = THOR(nn.Sequential(*(c(3, 3) for c in classes), nn.Linear(9, 9))).coverage()
    assert [entry.reason for entry in entries[::2]] == [
        "no curvature for InOut",
        "Gated overrides the forward of Linear",
        "no curvature for library.Linear",
        "library.Linear overrides the forward of Linear",
        None,
    ]
    assert [entry.kind for entry in entries[4:6]] == ["library.Linear"] * 2
    # known by their names: PyTorch Geometric's, and timm's, which is derived from torch's
    for base, library in (
        (InOut, "torch_geometric.nn.dense.linear"),
        (nn.Linear, "timm.layers.linear"),
    ):
        known = type("Linear", (base,), {**body, "__module__": library})
        assert type(kind_of(known(2, 3))) is LinearKind
    register_kind(Gated, LinearKind)
    register_kind(InOut, InOutKind)
    optimizer = THOR(nn.Sequential(InOut(2, 3), nn.Linear(3, 30)))
    assert [(e.kind, e.factor_sizes) for e in optimizer.coverage()[:2]] == [
        ("InOut", (2, 3)),
        ("InOut", (3,)),
    ]
    assert "InOut" in repr(optimizer)
    assert why_not(Doubled(2, 3)) == "Doubled overrides the forward of InOut"
    assert kind_of(Doubled(2, 3)) is None
    assert [type(kind_of(c(2, 3))) for c in (Gated, InOut, Named)] == [
        LinearKind,
        InOutKind,
        InOutKind,
    ]
    register_kind(Named, TurnedKind)
    assert [type(kind_of(c(2, 3))) for c in (InOut, Named)] == [InOutKind, TurnedKind]


@pytest.mark.parametrize(("certain", "terms"), [(True, 6), (False, 5)])
def test_a_kind_can_say_that_its_input_is_batch_first(certain, terms):
    """Of layers that see (L, N, d) and (N, L, d) it decides which number is N."""
    Turned = type("Turned", (nn.Module,), {"forward": lambda self, x: x.transpose(0, 1)})
    kind = type("Kind", (CopiedKind,), {"batch_first": certain})
    register_kind(InOut, kind)
    model = nn.Sequential(nn.Linear(3, 4), Turned(), InOut(4, 4), Turned(), nn.Linear(4, 2))
    optimizer = THOR(model, lr=0.0)
    model(torch.randn(5, 6, 3)).square().mean().backward()  # (L, N, d)
    optimizer.step()
    assert optimizer.param_groups[0]["last_loss_terms"] == terms


# ---- what does not fit ---------------------------------------------------------------------------


def test_what_is_no_kind():
    for module, kind, error, match in (
        (
            InOut(2, 3),
            InOutKind,
            TypeError,
            r"module_type=InOut\(\) must be a class of torch.nn.Module; give the",
        ),
        (
            int,
            InOutKind,
            TypeError,
            r"module_type=<class 'int'> must be a class of torch.nn.Module",
        ),
        (InOut, 3, TypeError, r"kind=3 must be a class of kinds, or return one; derive it from"),
        (
            InOut,
            MatrixWeight,
            TypeError,
            r"MatrixWeight has no loss_terms, row_shape, add_inputs_, .*; derive",
        ),
        (
            nn.Linear,
            InOutKind,
            ValueError,
            r"torch\.nn\.modules\.linear\.Linear is registered already, .*; register",
        ),
    ):
        with pytest.raises(error, match=match):
            register_kind(module, kind)


def test_a_kind_that_does_not_fit_its_module():
    def changed(**changes):
        sizes = {"inputs": 5, "outputs": 6, **changes}
        return type(
            "Changed", (InOutKind,), {"__init__": lambda self, module: vars(self).update(sizes)}
        )

    whole = "they must be whole numbers whose product is the weight's 30 numbers; correct the kind"
    order = r"makes \(1, 6, 5\) of .*\(groups, inputs, outputs\) = \(1, 5, 6\); correct"
    cases = (
        (
            changed(inputs=4),
            {},
            rf"Changed, registered for Layer0, .*inputs=4 of .* shape \(5, 6\): {whole}",
        ),
        (changed(inputs=5.0), {}, rf"inputs=5.0 of a weight .*: {whole}"),
        (changed(inputs=-5, outputs=-6), {}, rf"outputs=-6, inputs=-5 of a weight .*: {whole}"),
        (changed(to_matrix=lambda tensor: tensor.T[None]), {}, order),
        (
            InOutKind,
            {"weight": "kernel"},
            r"has the weight 'kernel', and the module has no .* that name; name it",
        ),
        (
            InOutKind,
            {"bias": "weight"},
            r"solves_biases=True of a bias of shape \(5, 6\): .* each of the 6 outputs",
        ),
        (
            lambda module: object(),
            {},
            r"<lambda>, registered for Layer6, has no loss_terms, .*, label, groups, inputs",
        ),
    )
    for i, (kind, names, match) in enumerate(cases):
        layer = type(f"Layer{i}", (InOut,), {})
        register_kind(layer, kind, **names)
        with pytest.raises(ValueError, match=match):
            THOR(nn.Sequential(layer(5, 6), nn.Linear(6, 3)))
