"""Layers with a kind that a user has registered: they are trained as linear layers are."""

import math

import pytest
import torch
from torch import nn
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextScaledWordEmbedding

from comparing import having
from tiny import train
from torch_thor import THOR, ThorMuon, register_kind
from torch_thor.curvature import LinearKind
from torch_thor.curvature.kinds import kind_of, registry


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
    """A projection to heads of two numbers; the weight is (in, heads, 2)."""

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
    """The parameters in the shapes of linear layers."""
    found = []
    for layer in model:
        own = [p.detach() for p in layer.parameters()]
        if own and not isinstance(layer, nn.Linear):
            own = [own[0].flatten(1).mT, own[1].flatten()]
        found += own
    return found


def twins(layer):
    """A network of such layers, and a network of linear layers with the same numbers."""
    model, twin = network(layer), network(nn.Linear)
    with torch.no_grad():
        for p, value in zip(twin.parameters(), as_linear(model), strict=True):
            p.copy_(value)
    return model, twin


MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
CASES = [
    (THOR, {"split_dim": 4, "nesterov": True}, None),
    (THOR, {"split_dim": None, "weight_decay": 0.01, "factor_decay": 0.5}, MASK),
    (ThorMuon, {"split_dim": 4}, MASK),
]


@pytest.mark.parametrize("layer", [InOut, PerHead])
@pytest.mark.parametrize(("method", "options", "mask"), CASES)
def test_steps_and_factors_are_those_of_linear_layers(layer, method, options, mask):
    register_kind(InOut, CopiedKind)
    register_kind(PerHead, PerHeadKind, weight="kernel", bias="offset")
    stream = [(torch.randn(3, 4, 5).double(), torch.randint(3, (3, 4))) for _ in range(8)]
    options = {"update_interval": 3, "max_update_ratio": None, **options}
    models, optimizers = twins(layer), []
    for model in models:
        optimizers.append(having(method(model, **options), row_mask=mask))
        train(model, optimizers[-1], stream)
    rtol = 1e-6 if method is ThorMuon else 1e-8  # polar factors are iterated to some accuracy
    torch.testing.assert_close(*map(as_linear, models), rtol=rtol, atol=rtol / 100)
    for ours, its in zip(*(each.curvature.values() for each in optimizers), strict=True):
        assert (ours.refreshes, ours.rows_per_term) == (its.refreshes, its.rows_per_term)
        assert ours.refreshes > 1
        torch.testing.assert_close(ours.factors(), its.factors(), rtol=1e-6, atol=1e-9)


# ---- which modules -------------------------------------------------------------------------------


def louder(base, name="Louder"):
    """A class whose forward does more than the forward of its base."""
    return type(name, (base,), {"forward": lambda self, x: 2 * base.forward(self, x)})


Gated = louder(nn.Linear, "Gated")
BODY = {"__module__": "library", "forward": lambda self, x: x @ self.weight}
OTHER_LINEAR = type("Linear", (nn.Linear,), BODY)
T5 = T5Gemma2TextScaledWordEmbedding(7, 4, 0, embed_scale=2.0, eoi_token_index=3)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (InOut(3, 3), "no curvature for InOut"),
        (Gated(3, 3), "Gated overrides the forward of Linear"),
        # two classes have one name: the Python module of the class is told
        (
            type("Linear", (nn.Linear,), BODY)(3, 3),
            "library.Linear overrides the forward of Linear",
        ),
        (T5, "T5Gemma2TextScaledWordEmbedding overrides the forward of Embedding"),
        (louder(nn.LSTM)(3, 4), "Louder overrides the forward of LSTM"),
    ],
)
def test_what_a_class_of_its_own_computes_is_not_guessed(module, reason):
    entry, *_, last = THOR(nn.Sequential(module, nn.Linear(40, 9))).coverage()
    assert entry.reason == reason
    assert last.preconditioned


@pytest.mark.parametrize("library", ["torch_geometric.nn.dense.linear", "timm.layers.linear"])
def test_layers_of_libraries_are_known_by_their_names(library):
    known = type("Linear", (nn.Linear,), {**BODY, "__module__": library})
    assert type(kind_of(known(2, 3))) is LinearKind


def test_which_modules():
    """Instances of the class, and of subclasses that run its forward; the nearest class counts."""
    Named = type("Named", (InOut,), {})
    register_kind(Gated, LinearKind)
    register_kind(InOut, InOutKind)
    entries = THOR(nn.Sequential(InOut(2, 3), nn.Linear(3, 30))).coverage()[:2]
    found = [(entry.kind, entry.factor_sizes) for entry in entries]
    assert found == [("InOut", (2, 3)), ("InOut", (3,))]
    assert kind_of(louder(InOut)(2, 3)) is None
    kinds = [type(kind_of(c(2, 3))) for c in (Gated, InOut, Named)]
    assert kinds == [LinearKind, InOutKind, InOutKind]
    register_kind(Named, CopiedKind)
    assert [type(kind_of(c(2, 3))) for c in (InOut, Named)] == [InOutKind, CopiedKind]


# ---- what does not fit ---------------------------------------------------------------------------


def test_a_class_that_is_registered_already():
    with pytest.raises(ValueError, match=r"modules\.linear\.Linear is registered already"):
        register_kind(nn.Linear, InOutKind)


def wrong_size(module):
    kind = InOutKind(module)
    kind.inputs = 4
    return kind


WHOLE = "they must be whole numbers whose product is the weight's 30 numbers"


@pytest.mark.parametrize(
    ("kind", "names", "match"),
    [
        (wrong_size, {}, rf"wrong_size, registered for Own, .*inputs=4 of .*: {WHOLE}"),
        (InOutKind, {"weight": "kernel"}, r"has the weight 'kernel', and the module has no"),
        (lambda module: object(), {}, "<lambda>, registered for Own, has no loss_terms, .*, label"),
    ],
)
def test_a_kind_that_does_not_fit_its_module(kind, names, match):
    own = type("Own", (InOut,), {})
    register_kind(own, kind, **names)
    with pytest.raises(ValueError, match=match):
        THOR(nn.Sequential(own(5, 6), nn.Linear(6, 3)))
