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


# ---- shared weights ------------------------------------------------------------------------------


def shared(first, second):
    model = nn.Sequential(first, second)
    second.register_parameter("weight", first.weight)
    return model


def test_modules_of_one_geometry_pool_their_rows():
    model = shared(nn.Linear(4, 4), nn.Linear(4, 4))
    found = inspect(model)
    (layer,) = found.layers.values()
    assert layer.name == "0"
    assert [use.module for use in layer.uses] == list(model)
    assert [bias.module for bias in layer.biases] == list(model)
    assert found.entries[0].note == "shared with '1.weight'"
    model[1].bias = model[0].bias  # then it is nobody's
    found = inspect(model)
    assert found.layers["0"].biases == []
    assert reasons(found) == {"0.bias": "shared by '0.bias', '1.bias'"}


def test_a_tied_decoder_goes_with_its_embedding():
    model = shared(nn.Embedding(7, 4), nn.Linear(4, 7))
    found = inspect(model)
    (layer,) = found.layers.values()
    assert layer.kind.label == "Embedding"
    assert [use.module for use in layer.uses] == [model[0]]
    assert reasons(found) == {
        "1.bias": "the weight of its layer is preconditioned as that of '0', with another G"
    }


def test_what_does_not_fit_together_has_no_factors():
    """Neither is of one geometry, nor is one an embedding and the rest its decoders; or a module
    has no kind.
    """
    model = shared(nn.Embedding(7, 4), Conv1D(4, 7)).append(nn.Linear(3, 3))
    found = inspect(model)
    assert set(found.layers) == {"2"}
    assert reasons(found) == {
        "0.weight": "shared by '0.weight', '1.weight'",
        "1.bias": WITHOUT_WEIGHT,
    }
    bilinear = nn.Bilinear(4, 1, 4, bias=False)
    assert reasons(inspect(shared(nn.Linear(4, 4), bilinear)))["0.weight"] == (
        "shared by '0.weight', '1.weight'"
    )


# ---- normalisation -------------------------------------------------------------------------------


class ModelRMSNorm(nn.Module):
    """A library's own: known by its name and its vectors."""

    def __init__(self, shape=(4,)):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.BatchNorm1d(4), ModelRMSNorm()],
)
def test_norms(norm):
    found = inspect(nn.Sequential(nn.Linear(3, 4), norm))
    assert set(found.layers) == {"0"}
    assert set(reasons(found).values()) == {"a normalisation layer"}


def test_the_name_alone_makes_no_norm():
    found = inspect(nn.Sequential(nn.Linear(3, 4), ModelRMSNorm((4, 4))))
    assert reasons(found) == {"1.weight": "no curvature for ModelRMSNorm"}


# ---- attention, experts --------------------------------------------------------------------------


def test_attentions_that_share_their_weights():
    """Neither has those of its own; what they do not share is preconditioned."""
    model = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": nn.MultiheadAttention(4, 2)})
    model["b"].in_proj_weight = model["a"].in_proj_weight
    found = inspect(model)
    assert set(found.layers) == {"a.out_proj", "b.out_proj"}
    assert reasons(found) == {
        "a.in_proj_weight": "shared by 'a.in_proj_weight', 'b.in_proj_weight'",
        "a.in_proj_bias": WITHOUT_WEIGHT,
        "b.in_proj_bias": WITHOUT_WEIGHT,
    }


class Experts(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def test_experts():
    model = nn.ModuleDict(
        {"experts": Experts(up=(3, 6, 4), up_bias=(3, 6), down=(3, 4, 6), scale=(3,))}
    )
    found = inspect(model)
    assert set(found.layers) == {"experts.up", "experts.down"}
    assert reasons(found) == {"experts.scale": "belongs to no layer inside Experts"}
    for count in (3, 4):  # a module that is called otherwise: its number of experts tells
        mixture = type("Mixture", (Experts,), {})(weight=(3, 6, 4))
        mixture.num_experts = count
        assert ("1.weight" in inspect(nn.Sequential(nn.Linear(4, 4), mixture)).layers) == (
            count == 3
        )
    positions = Experts(positions=(1, 6, 4))  # a position embedding is no expert
    assert set(inspect(nn.Sequential(nn.Linear(4, 4), positions)).layers) == {"0"}


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
        (nn.LSTM(4, 4), "weight_ih_l0", "bias_ih_l0"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", "in_proj_bias"),
        (nn.GRUCell(4, 4), "weight_hh", "bias_hh"),
    ],
)
def test_a_weight_inside_a_module_that_the_optimizer_has_not(module, weight, bias):
    trained = [p for p in module.parameters() if p is not module.get_parameter(weight)]
    assert reasons(inspect(module, trained)) == {weight: NOT_TRAINED, bias: WITHOUT_WEIGHT}


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


@pytest.mark.parametrize(
    ("module", "bias"),
    [
        (nn.Linear(3, 4), "bias"),
        (nn.GRU(3, 4), "bias_hh_l0"),
        (nn.MultiheadAttention(4, 2), "in_proj_bias"),
    ],
)
def test_what_biases_are_computed_from(module, bias):
    """The weight is preconditioned as ever."""
    found = inspect(nn.ModuleDict({"m": prune.identity(module, bias)}))
    why = f"{bias!r} is computed from it (pruned, weight_norm)"
    assert reasons(found).keys() == {f"m.{bias}_orig"}
    assert reasons(found)[f"m.{bias}_orig"].startswith(why)


def test_without_g():
    """ThorMuon takes A alone: of no embeddings, and of no biases."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    found = inspect(model, inputs_alone=True)
    assert set(found.layers) == {"1"}
    assert found.layers["1"].biases == []
    assert reasons(found) == {
        "0.weight": "the input factor is diagonal",
        "1.bias": "no matrix",
        "2.weight": "a normalisation layer",
        "2.bias": "a normalisation layer",
    }
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
