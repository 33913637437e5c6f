"""Layers with a kind that a user has registered: they are trained as linear layers are."""

import math
from itertools import product

import pytest
import torch
from timm.layers import ScaledStdConv2d
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
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
    """The parameters as those of linear layers."""
    found = []
    for layer in model:
        own = [p.detach() for p in layer.parameters()]
        if own and not isinstance(layer, nn.Linear):
            own = [own[0].flatten(1).mT, own[1].flatten()]
        found += own
    return found


def twins(layer):
    """A network of such layers, and one of linear layers with the same numbers."""
    model, twin = network(layer), network(nn.Linear)
    with torch.no_grad():
        for p, value in zip(twin.parameters(), as_linear(model), strict=True):
            p.copy_(value)
    return model, twin


MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
CASES = [
    (THOR, {"momentum": 0.9, "nesterov": True}, None),
    (THOR, {"weight_decay": 0.01, "factor_decay": 0.5}, MASK),
    (ThorMuon, {}, MASK),
]


@pytest.mark.parametrize("layer", [InOut, PerHead])
def test_steps_and_factors_are_those_of_linear_layers(layer):
    register_kind(InOut, CopiedKind)
    register_kind(PerHead, PerHeadKind, weight="kernel", bias="offset")
    stream = [(torch.randn(3, 4, 5).double(), torch.randint(3, (3, 4))) for _ in range(8)]
    for (method, options, mask), split_dim in product(CASES, (None, 4)):
        options = {**options, "split_dim": split_dim, "max_update_ratio": None}
        models, optimizers = twins(layer), []
        for model in models:
            optimizers.append(having(method(model, update_interval=3, **options), row_mask=mask))
            train(model, optimizers[-1], stream)
        rtol = 1e-6 if method is ThorMuon else 1e-8  # polar factors are iterated to some accuracy
        torch.testing.assert_close(*map(as_linear, models), rtol=rtol, atol=rtol / 100)
        for one, other in zip(*(each.curvature.values() for each in optimizers), strict=True):
            assert (one.refreshes, one.rows_per_term) == (other.refreshes, other.rows_per_term)
            assert one.refreshes > 1
            torch.testing.assert_close(one.factors(), other.factors(), rtol=1e-6, atol=1e-9)


# ---- which modules -------------------------------------------------------------------------------


class Gated(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


class OfPositions(nn.Embedding):
    """What it wants is no tokens."""

    embed_scale = 2.0

    def forward(self, tokens, positions):
        return super().forward(positions) * self.embed_scale


def louder(base, name="Louder"):
    """A class whose forward does more than that of its base."""
    return type(name, (base,), {"forward": lambda self, x: 2 * base.forward(self, x)})


# of two classes of one name, the one that is not registered is named with its Python module
BODY = {"__module__": "library", "forward": lambda self, x: x @ self.weight}
OTHER, OVERRIDING = type("Linear", (InOut,), BODY), type("Linear", (nn.Linear,), BODY)
T5 = T5Gemma2TextScaledWordEmbedding(7, 4, 0, embed_scale=2.0, eoi_token_index=3)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (InOut(3, 3), "no curvature for InOut"),
        (OTHER(3, 3), "no curvature for library.Linear"),
        (OVERRIDING(3, 3), "library.Linear overrides the forward of Linear"),
        (Gated(3, 3), "Gated overrides the forward of Linear"),
        (louder(BartScaledWordEmbedding)(7, 4, None), "Louder overrides the forward of Embedding"),
        (OfPositions(7, 4), "OfPositions overrides the forward of Embedding"),
        (T5, "T5Gemma2TextScaledWordEmbedding overrides the forward of Embedding"),
        (louder(ScaledStdConv2d)(2, 3, 1), "Louder overrides the forward of Conv2d"),
        (louder(nn.Conv2d, "StdConv2d")(2, 3, 1), "StdConv2d overrides the forward of Conv2d"),
        (louder(nn.LSTM)(3, 4), "Louder overrides the forward of LSTM"),
    ],
)
def test_what_a_class_of_its_own_computes_is_not_guessed(module, reason):
    entry, *_, last = THOR(nn.Sequential(module, nn.Linear(40, 9))).coverage()
    assert entry.reason == reason
    assert entry.kind == type(module).__name__ or "library" in reason
    assert last.preconditioned


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
    register_kind(Gated, LinearKind)
    register_kind(InOut, InOutKind)
    optimizer = THOR(nn.Sequential(InOut(2, 3), nn.Linear(3, 30)))
    entries = [(entry.kind, entry.factor_sizes) for entry in optimizer.coverage()[:2]]
    assert entries == [("InOut", (2, 3)), ("InOut", (3,))]
    assert "InOut" in repr(optimizer)
    assert kind_of(louder(InOut)(2, 3)) is None
    kinds = [type(kind_of(c(2, 3))) for c in (Gated, InOut, Named)]
    assert kinds == [LinearKind, InOutKind, InOutKind]
    register_kind(Named, CopiedKind)
    assert [type(kind_of(c(2, 3))) for c in (InOut, Named)] == [InOutKind, CopiedKind]


# ---- what does not fit ---------------------------------------------------------------------------


def test_what_cannot_be_registered():
    with pytest.raises(TypeError, match=r"module_type=InOut\(\) must be a class of"):
        register_kind(InOut(2, 3), InOutKind)
    with pytest.raises(ValueError, match=r"modules\.linear\.Linear is registered already"):
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
        (lambda module: object(), {}, "<lambda>, registered for Own, has no loss_terms, .*, label"),
    ],
)
def test_a_kind_that_does_not_fit_its_module(kind, names, match):
    own = type("Own", (InOut,), {})
    register_kind(own, kind, **names)
    with pytest.raises(ValueError, match=match):
        THOR(nn.Sequential(own(5, 6), nn.Linear(6, 3)))
