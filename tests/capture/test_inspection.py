"""What a model is found to hold: layers, who shares what, and why the rest has no factors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.pytorch_utils import Conv1D

from torch_thor.capture import inspection
from torch_thor.capture.coverage import covered
from torch_thor.capture.reasons import NOT_TRAINED

WITHOUT_WEIGHT = "the weight of its layer is not preconditioned"


def inspect(model, trained=None, **options):
    """What is found, with the entry of each parameter."""
    trained = model.parameters() if trained is None else trained
    found = inspection.inspect(model, trained, **options)
    entries = covered(model, found, "momentum", None)
    return SimpleNamespace(layers=found.layers, entries=entries)


def reasons(found):
    return {entry.name: entry.reason for entry in found.entries if not entry.preconditioned}


def shared(first, second):
    second.register_parameter("weight", first.weight)
    return nn.Sequential(first, second)


def shared_bias():
    model = shared(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    return model


def shared_attentions():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": nn.MultiheadAttention(4, 2)})
    model["b"].in_proj_weight = model["a"].in_proj_weight
    return model


def behind_a_layer(module):
    return nn.Sequential(nn.Linear(3, 4), module)


class ModelRMSNorm(nn.Module):
    """A library's own: known by its name and its vectors."""

    def __init__(self, shape=(4,)):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class Experts(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def mixture(count):
    """A module that is called otherwise: its number of experts tells."""
    found = type("Mixture", (Experts,), {})(weight=(3, 6, 4))
    found.num_experts = count
    return found


BOTH = "shared by '0.weight', '1.weight'"
ALIKE = {"a.in_proj_weight": "shared by 'a.in_proj_weight', 'b.in_proj_weight'"}
ALIKE |= {"a.in_proj_bias": WITHOUT_WEIGHT, "b.in_proj_bias": WITHOUT_WEIGHT}
LOOSE = {"1.scale": "belongs to no layer inside Experts"}
EXPERTS = {"up": (3, 6, 4), "up_bias": (3, 6), "down": (3, 4, 6), "scale": (3,)}
NORM = {"1.weight": "a normalisation layer", "1.bias": "a normalisation layer"}
# what a model is, its layers, and why the other parameters have no factors
CASES = [
    (shared_bias(), ["0"], {"0.bias": "shared by '0.bias', '1.bias'"}),
    # neither of one geometry, nor an embedding and its decoders; or a module without a kind
    (shared(nn.Embedding(7, 4), Conv1D(4, 7)), [], {"0.weight": BOTH, "1.bias": WITHOUT_WEIGHT}),
    (shared(nn.Linear(4, 4, bias=False), nn.Bilinear(4, 1, 4, bias=False)), [], {"0.weight": BOTH}),
    (shared_attentions(), ["a.out_proj", "b.out_proj"], ALIKE),
    (behind_a_layer(nn.LayerNorm(4)), ["0"], NORM),
    (behind_a_layer(nn.GroupNorm(2, 4)), ["0"], NORM),
    (behind_a_layer(nn.BatchNorm1d(4)), ["0"], NORM),
    (behind_a_layer(nn.RMSNorm(4)), ["0"], {"1.weight": NORM["1.weight"]}),
    (behind_a_layer(ModelRMSNorm()), ["0"], {"1.weight": NORM["1.weight"]}),
    (behind_a_layer(ModelRMSNorm((4, 4))), ["0"], {"1.weight": "no curvature for ModelRMSNorm"}),
    (behind_a_layer(Experts(**EXPERTS)), ["0", "1.up", "1.down"], LOOSE),
    (behind_a_layer(mixture(3)), ["0", "1.weight"], {}),
    (behind_a_layer(mixture(4)), ["0"], {"1.weight": "no curvature for Mixture"}),
    # a position embedding is no expert
    (behind_a_layer(Experts(places=(1, 6, 4))), ["0"], {"1.places": "no curvature for Experts"}),
]


@pytest.mark.parametrize(("model", "layers", "why"), CASES)
def test_layers_and_why_the_rest_has_no_factors(model, layers, why):
    found = inspect(model)
    assert list(found.layers) == layers
    assert reasons(found) == why


def test_modules_of_one_geometry_pool_their_rows():
    model = shared(nn.Linear(4, 4), nn.Linear(4, 4))
    found = inspect(model)
    (layer,) = found.layers.values()
    assert [use.module for use in layer.uses] == list(model)
    assert [bias.module for bias in layer.biases] == list(model)
    assert found.entries[0].note == "shared with '1.weight'"


def test_a_tied_decoder_goes_with_its_embedding():
    model = shared(nn.Embedding(7, 4), nn.Linear(4, 7))
    found = inspect(model)
    (layer,) = found.layers.values()
    assert layer.kind.label == "Embedding"
    assert [use.module for use in layer.uses] == [model[0]]
    assert reasons(found) == {
        "1.bias": "the weight of its layer is preconditioned as the weight of '0', with another G"
    }


# ---- what is not there, or is computed -----------------------------------------------------------


def test_what_the_optimizer_has_not():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    found = inspect(model, model[1].parameters())
    assert set(found.layers) == {"1"}
    assert reasons(found) == {"0.weight": NOT_TRAINED, "0.bias": NOT_TRAINED}
    assert [entry.trained for entry in found.entries] == [False, False, True, True]
    with pytest.raises(ValueError, match=r"parameter '0.weight' has no shape yet; run one batch"):
        inspect(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize(
    ("module", "weight", "bias"),
    [
        (nn.Linear(3, 4), "weight", "bias"),
        (nn.LSTM(4, 4), "weight_ih_l0", "bias_ih_l0"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", "in_proj_bias"),
        (nn.GRUCell(4, 4), "weight_hh", "bias_hh"),
    ],
)
def test_a_weight_that_the_optimizer_has_not_and_a_bias_that_is_computed(module, weight, bias):
    """Of a computed bias the weight is preconditioned as ever."""
    trained = [p for p in module.parameters() if p is not module.get_parameter(weight)]
    assert reasons(inspect(module, trained)) == {weight: NOT_TRAINED, bias: WITHOUT_WEIGHT}
    ((name, why),) = reasons(inspect(prune.identity(module, bias))).items()
    assert name == f"{bias}_orig"
    assert why.startswith(f"{bias!r} is computed from it (pruned, weight_norm)")


@pytest.mark.parametrize("change", [prune.identity, parametrizations.weight_norm])
def test_what_weights_are_computed_from(change):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    change(model[0], "weight")
    assert set(inspect(model).layers) == {"1"}
    attention = nn.MultiheadAttention(4, 2)
    change(attention, "in_proj_weight")
    assert set(inspect(attention).layers) == {"out_proj"}
    assert reasons(inspect(attention))["in_proj_bias"] == WITHOUT_WEIGHT
    change((attention := nn.MultiheadAttention(4, 2)).out_proj, "weight")
    assert set(inspect(attention).layers) == {"q_proj", "k_proj", "v_proj"}


def test_without_g():
    """ThorMuon takes A alone: of no embeddings, and of no biases."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    found = inspect(model, inputs_alone=True)
    assert set(found.layers) == {"1"}
    assert found.layers["1"].biases == []
    assert reasons(found) == {"0.weight": "the input factor is diagonal", "1.bias": "no matrix"}
    assert found.entries[1].factor_sizes == (4,)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [(None, ["AdamW"] * 4), ("Muon", ["Muon", "AdamW", "Muon", "AdamW"])],
)
def test_how_the_rest_is_trained(matrix, words):
    """In the optimizer's words."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 2))
    found = inspection.inspect(model, model.parameters(), inputs_alone=True)
    entries = covered(model, found, "AdamW", matrix, {"1.weight"})
    assert [entry.rest for entry in entries] == words
