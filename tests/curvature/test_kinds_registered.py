"""Layers of the user's own, with a kind that is registered for them."""

import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import torch_thor
from comparing import assert_matches_reference, compare
from reference.agc import clipped, output_of_each_number
from tiny import assert_same, batches, cross_entropy, train, weights
from torch_thor import THOR, ThorMuon, adaptive_clip_grad_, register_kind
from torch_thor.curvature import LinearKind, MatrixWeight
from torch_thor.curvature.kinds import kind_of, registry, why_not


class InOut(nn.Module):
    """A linear layer whose weight is (in, out)."""

    inputs_come_first = True  # to the reference

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 2)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class InOutKind(LinearKind):
    """It has the inputs first."""

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
    """A projection to several heads: the weight is (in, heads, size); no parameter has its usual name."""

    inputs_come_first = True

    def __init__(self, inputs, heads, size):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, heads, size) / 2)
        self.offset = nn.Parameter(torch.randn(heads, size))

    def forward(self, tokens):
        return (torch.einsum("...i,ihs->...hs", tokens, self.kernel) + self.offset).flatten(-2)

    # what the reference asks for
    weight = property(lambda self: self.kernel)
    bias = property(lambda self: self.offset)


class PerHeadKind(MatrixWeight):
    """All of it written down, with nothing of the linear layer's."""

    label, groups, diagonal_input, transposed = "PerHead", 1, False, True

    def __init__(self, module):
        self.inputs, self.outputs = len(module.kernel), math.prod(module.kernel.shape[1:])

    def loss_terms(self, x):
        return len(x)

    def row_shape(self, x):
        return x.shape[:-1]

    def add_inputs_(self, a, x, output, keep, most=None):
        rows = x.reshape(-1, self.inputs)[slice(None) if keep is None else keep.reshape(-1)]
        a.add_second_moment_(rows.to(a.dtype).mT[None])
        return len(rows)

    def add_outputs_(self, g, x, grad, keep):
        rows = grad.reshape(-1, self.outputs)[slice(None) if keep is None else keep.reshape(-1)]
        g.add_second_moment_(rows.to(g.dtype).mT[None])

    def to_matrix(self, tensor):
        return tensor.reshape(1, self.inputs, self.outputs)

    def from_matrix_(self, matrix, tensor):
        tensor.copy_(matrix.view_as(tensor))


class Plain(nn.Module):
    """A linear layer that is no ``nn.Linear``, as that of PyTorch Geometric."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("kind", [THOR, ThorMuon])
def test_a_linear_layer_of_another_library_takes_the_steps_of_torchs(kind):
    """Known by its name, as those of PyTorch Geometric and of timm, which derives it from torch's, or registered."""
    geometric = type("Linear", (Plain,), {"__module__": "torch_geometric.nn.dense.linear", "forward": Plain.forward})
    timm = type("Linear", (nn.Linear,), {"__module__": "timm.layers.linear", "forward": Plain.forward})
    for layer in (geometric, timm, Plain):
        if layer is Plain:
            register_kind(Plain, LinearKind)
        model, twin = (nn.Sequential(one(5, 7), nn.Tanh(), one(7, 3)).double() for one in (layer, nn.Linear))
        twin.load_state_dict(model.state_dict())
        for one in (model, twin):
            train(one, kind(one, update_interval=2), STREAM[:4])
        assert_same(weights(model), weights(twin))


OWN_NAMES = {"weight": "kernel", "bias": "offset"}
KINDS = {
    "transposed": (InOut, InOutKind, {}),
    "turned": (InOut, TurnedKind, {}),
    "copied": (InOut, CopiedKind, {}),
    "heads": (PerHead, PerHeadKind, OWN_NAMES),
}
STREAM = batches(8)


@pytest.fixture(autouse=True)
def _registered_for_one_test(monkeypatch):
    monkeypatch.setattr(registry.KINDS, "classes", dict(registry.KINDS.classes))


@pytest.fixture(params=KINDS)
def make(request):
    """Makes a network of such layers; their kind is registered."""
    module, kind, names = KINDS[request.param]
    register_kind(module, kind, **names)

    def network():
        torch.manual_seed(4)
        first, second = (PerHead(5, 2, 3), PerHead(6, 2, 2)) if module is PerHead else (InOut(5, 6), InOut(6, 4))
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(4, 3)).double()

    return network


def test_factors_and_steps(make):
    for split_dim in (None, 4):
        for shape in ((7, 5), (3, 4, 5)):
            x, terms = torch.randn(shape, dtype=torch.float64), shape[0]
            loss = partial(lambda terms, y: (y**3).sum() / terms, terms)
            assert_matches_reference(make(), x, loss, terms=terms, split_dim=split_dim)
    stream = [(x, cross_entropy(labels)) for x, labels in STREAM]
    for options in ({"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.01, "factor_decay": 0.5}):
        compare(make(), stream, update_interval=3, split_dim=4, **options)


def test_scale_free_steps_are_those_of_linear_layers(make):
    """Nothing but the place of the numbers is another."""
    model = make()
    twin = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    for own, other in zip(model, twin, strict=True):
        if isinstance(other, nn.Linear):
            with torch.no_grad():
                other.weight.copy_(own.weight if isinstance(own, nn.Linear) else own.weight.flatten(1).mT)
                other.bias.copy_(own.bias.flatten())
    for one in (model, twin):
        train(one, ThorMuon(one, split_dim=4), STREAM)
    x = STREAM[0][0]
    torch.testing.assert_close(model(x), twin(x), rtol=1e-6, atol=1e-8)  # what polar factors are iterated to


def test_coverage_and_rows_that_are_masked(make):
    """The mask has the leading dimensions of the input, as the kind says."""
    model, x = make(), torch.randn(3, 4, 5, dtype=torch.float64)
    optimizer = THOR(model, lr=0.0)
    optimizer.row_mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    rows = x[optimizer.row_mask]
    model(x).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.curvature["0"].factors()[0], rows.mT @ rows / len(rows))
    label = kind_of(model[0]).label
    found = [(e.kind, e.factor_sizes, e.reason) for e in optimizer.coverage()[:2]]
    assert found == [(label, (5, 6), None), (label, (6,), None)]
    assert label in repr(optimizer)


def test_checkpoint(make):
    """Saved in the middle, loaded, and gone on with: the same bits."""

    def trained(stream, start=None):
        model = make()
        optimizer = THOR(model, update_interval=3)
        for new, old in zip((model, optimizer), start or (), strict=False):
            new.load_state_dict(old.state_dict())
        train(model, optimizer, stream)
        return model, optimizer

    model, optimizer = trained(STREAM[4:], trained(STREAM[:4]))
    assert_same(weights(model), weights(trained(STREAM)[0]))
    assert set(optimizer.curvature) == {"0", "2", "4"}


@pytest.mark.parametrize("foreach", [None, False])
def test_units_of_clipping(make, foreach):
    """A unit is an output, wherever its numbers are; which, the reference finds by trying."""
    layer = make()[0]
    units = output_of_each_number(layer, (1, 5))
    weight = layer.weight
    weight.grad = torch.randn_like(weight)
    weight.grad[0] *= 30
    expected, count = clipped(weight.detach().numpy(), weight.grad.clone().numpy(), units, 1.0, 1e-3)
    assert 0 < count <= 6
    found = adaptive_clip_grad_(layer, 1.0, exclude=(), foreach=foreach)
    np.testing.assert_allclose(weight.grad.numpy(), expected, rtol=1e-12)
    assert (int(found.clipped), found.units) == (count, 6)


# ---- which modules ---------------------------------------------------------------------------------------------------


def test_which_modules():
    """Those of the class and of subclasses that run its forward; of several classes the nearest."""
    Named = type("Named", (InOut,), {})
    Doubled = type("Doubled", (InOut,), {"forward": lambda self, x: 2 * InOut.forward(self, x)})
    Gated = type("Gated", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x).tanh()})
    assert why_not(InOut(2, 3)) == "no curvature for InOut"
    assert why_not(Gated(2, 3)) == "Gated overrides the forward of Linear"
    entries = THOR(nn.Sequential(InOut(2, 3), nn.Linear(3, 30))).coverage()
    assert [entry.reason for entry in entries] == ["no curvature for InOut"] * 2 + [None] * 2
    register_kind(Gated, LinearKind)
    assert type(kind_of(Gated(2, 3))) is LinearKind
    register_kind(InOut, InOutKind)
    assert type(kind_of(Named(2, 3))) is InOutKind
    assert kind_of(Doubled(2, 3)) is None
    assert why_not(Doubled(2, 3)) == "Doubled overrides the forward of InOut"
    register_kind(Named, TurnedKind)
    assert type(kind_of(Named(2, 3))) is TurnedKind
    assert type(kind_of(InOut(2, 3))) is InOutKind
    with pytest.raises(ValueError, match="InOut is registered already, and a class is registered once; register"):
        register_kind(InOut, InOutKind)


def test_it_is_public():
    assert torch_thor.register_kind is torch_thor.curvature.register_kind is register_kind
    assert "register_kind" in torch_thor.__all__


@pytest.mark.parametrize(("certain", "terms"), [(True, 6), (False, 5), (None, 5)])
def test_a_kind_can_say_that_its_input_is_batch_first(certain, terms):
    """Of layers that see (L, N, d) and (N, L, d) it decides which number is N; without the attribute it does not."""

    class BatchFirstKind(CopiedKind):
        batch_first = certain

    class Turned(nn.Module):
        def forward(self, x):
            return x.transpose(0, 1)

    if certain is None:
        del BatchFirstKind.batch_first
    register_kind(InOut, BatchFirstKind)
    model = nn.Sequential(nn.Linear(3, 4), Turned(), InOut(4, 4), Turned(), nn.Linear(4, 2))
    optimizer = THOR(model, lr=0.0)
    model(torch.randn(5, 6, 3)).square().mean().backward()  # (L, N, d)
    optimizer.step()
    assert optimizer.param_groups[0]["last_loss_terms"] == terms


# ---- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "kind", "error", "match"),
    [
        (InOut(2, 3), InOutKind, TypeError, r"module_type=InOut\(\) must be a class of torch.nn.Module; give the"),
        (int, InOutKind, TypeError, r"module_type=<class 'int'> must be a class of torch.nn.Module"),
        (InOut, 3, TypeError, r"kind=3 must be a class of kinds, or return one; derive it from"),
        (
            InOut,
            MatrixWeight,
            TypeError,
            r"MatrixWeight has no loss_terms, row_shape, add_inputs_, add_outputs_, .*; derive",
        ),
        (nn.Linear, InOutKind, ValueError, r"torch\.nn\.modules\.linear\.Linear is registered already, .*; register"),
    ],
)
def test_what_is_no_kind(module, kind, error, match):
    with pytest.raises(error, match=match):
        register_kind(module, kind)


def test_two_classes_of_one_name_are_told_apart():
    """By the Python module of the one that is not registered, wherever it is named."""
    body = {"__module__": "library.layers", "forward": lambda self, x: x @ self.weight}
    other = type("Linear", (nn.Module,), body)()
    other.weight = nn.Parameter(torch.eye(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that little is preconditioned
        optimizer = THOR(nn.Sequential(nn.Linear(3, 3), other, type("Linear", (nn.Linear,), body)(3, 3)))
    found = [(e.kind, e.reason) for e in optimizer.coverage() if e.name.endswith("weight")]
    name = "library.layers.Linear"
    overridden = f"{name} overrides the forward of Linear"
    assert found == [("Linear", None), (name, f"no curvature for {name}"), (name, overridden)]


def changed(**changes):
    """InOutKind with other attributes."""

    def make(module):
        kind = InOutKind(module)
        for name, value in changes.items():
            setattr(kind, name, value)
        return kind

    make.__name__ = "Changed"
    return make


def turned(module):
    kind = InOutKind(module)
    kind.to_matrix = lambda tensor: tensor.T[None]
    return kind


turned.__name__ = "Turned"
WHOLE = "they must be whole numbers whose product is the weight's 30 numbers; correct the kind"


@pytest.mark.parametrize(
    ("kind", "names", "match"),
    [
        (changed(inputs=4), {}, rf"Changed, registered for InOut, .*inputs=4 of .* shape \(5, 6\): {WHOLE}"),
        (changed(inputs=5.0), {}, rf"inputs=5.0 of a weight .*: {WHOLE}"),
        (changed(inputs=-5, outputs=-6), {}, rf"outputs=-6, inputs=-5 of a weight .*: {WHOLE}"),
        (turned, {}, r"makes \(1, 6, 5\) of .*\(groups, inputs, outputs\) = \(1, 5, 6\); correct"),
        (InOutKind, {"weight": "kernel"}, r"has the weight 'kernel', and the module has no .* that name; name it"),
        (InOutKind, {"bias": "weight"}, r"solves_biases=True of a bias of shape \(5, 6\): .* each of the 6 outputs"),
        (lambda module: object(), {}, r"<lambda>, registered for InOut, has no loss_terms, .*, label, groups, inputs"),
    ],
)
def test_a_kind_that_does_not_fit_its_module(kind, names, match):
    register_kind(InOut, kind, **names)
    with pytest.raises(ValueError, match=match):
        THOR(nn.Sequential(InOut(5, 6), nn.Linear(6, 3)))
