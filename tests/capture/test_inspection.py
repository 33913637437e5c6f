"""What a model is found to hold: layers, who shares what, and why the rest has no factors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.pytorch_utils import Conv1D

from torch_thor.capture import inspection
from torch_thor.capture.coverage import Rest, covered
from torch_thor.capture.reasons import NOT_TRAINED


def inspect(model, trained=None, **options):
    """What is found, with the entry of each parameter."""
    trained = model.parameters() if trained is None else trained
    found = inspection.inspect(model, trained, **options)
    rest = Rest("momentum")
    return SimpleNamespace(layers=found.layers, entries=covered(model, found, rest))


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
    why = {"1.bias": "the weight of its layer is preconditioned as that of '0', with another G"}
    assert reasons(found) == why
    head = nn.Module()  # to which the bias may belong too
    head.decoder = model[1]
    head.bias = head.decoder.bias
    assert reasons(inspect(nn.Sequential(model[0], head))) == why


def test_what_does_not_fit_together_has_no_factors():
    """Neither is of one geometry, nor is one an embedding and the rest its decoders; or a module
    has no kind.
    """
    model = shared(nn.Embedding(7, 4), Conv1D(4, 7)).append(nn.Linear(3, 3))
    found = inspect(model)
    assert set(found.layers) == {"2"}
    assert reasons(found) == {
        "0.weight": "shared by '0.weight', '1.weight'",
        "1.bias": "the weight of its layer is not preconditioned",
    }
    strange = nn.Bilinear(4, 1, 4, bias=False)
    assert (
        reasons(inspect(shared(nn.Linear(4, 4), strange)))["0.weight"]
        == "shared by '0.weight', '1.weight'"
    )
    model = nn.Linear(4, 4)
    model.add_module("inside", strange)
    strange.register_parameter("weight", model.weight)
    assert reasons(inspect(model))["weight"] == "shared by 'weight', 'inside.weight'"


# ---- normalisation -------------------------------------------------------------------------------


class ModelRMSNorm(nn.Module):
    """A library's own: known by its name and its vectors."""

    def __init__(self, shape=(4,)):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


def test_norms():
    batch = nn.BatchNorm1d(4), nn.SyncBatchNorm(4)
    for norm in (nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), *batch, ModelRMSNorm()):
        found = inspect(nn.Sequential(nn.Linear(3, 4), norm))
        assert set(found.layers) == {"0"}
        assert set(reasons(found).values()) == {"a normalisation layer"}
    # the name alone says nothing
    found = inspect(nn.Sequential(nn.Linear(3, 4), ModelRMSNorm((4, 4))))
    assert reasons(found) == {"1.weight": "no curvature for ModelRMSNorm"}


# ---- attention, experts --------------------------------------------------------------------------


def test_attentions_that_share_their_weights():
    """Neither has those of its own; what they do not share is preconditioned."""
    model = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": nn.MultiheadAttention(4, 2)})
    model["b"].in_proj_weight, model["b"].out_proj.bias = (
        model["a"].in_proj_weight,
        model["a"].out_proj.bias,
    )
    found = inspect(model)
    assert set(found.layers) == {"a.out_proj", "b.out_proj"}
    assert all(not layer.biases for layer in found.layers.values())
    assert reasons(found) == {
        "a.in_proj_weight": "shared by 'a.in_proj_weight', 'b.in_proj_weight'",
        "a.in_proj_bias": "the weight of its layer is not preconditioned",
        "b.in_proj_bias": "the weight of its layer is not preconditioned",
        "a.out_proj.bias": "shared by 'a.out_proj.bias', 'b.out_proj.bias'",
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
    for module, weight, bias in (
        (nn.LSTM(4, 4), "weight_ih_l0", "bias_ih_l0"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", "in_proj_bias"),
        (nn.GRUCell(4, 4), "weight_hh", "bias_hh"),
    ):
        found = inspect(
            module, [p for p in module.parameters() if p is not module.get_parameter(weight)]
        )
        assert reasons(found) == {
            weight: NOT_TRAINED,
            bias: "the weight of its layer is not preconditioned",
        }
    with pytest.raises(
        ValueError, match=r"parameter '0.weight' has no shape yet; run one batch through the lazy"
    ):
        inspect(nn.Sequential(nn.LazyLinear(3)))


def test_what_weights_are_computed_from():
    pruned = prune.identity(nn.Linear(3, 4), "weight")
    why = reasons(inspect(nn.Sequential(pruned, nn.Linear(4, 2))))["0.weight_orig"]
    assert why.startswith("'weight' is computed from it (pruned, weight_norm)")
    # of one of an attention's weights
    for change in (prune.identity, parametrizations.weight_norm):
        attention = nn.MultiheadAttention(4, 2)
        change(attention, "in_proj_weight")
        assert set(inspect(attention).layers) == {"out_proj"}
        assert (
            reasons(inspect(attention))["in_proj_bias"]
            == "the weight of its layer is not preconditioned"
        )
        change((attention := nn.MultiheadAttention(4, 2)).out_proj, "weight")
        assert set(inspect(attention).layers) == {"q_proj", "k_proj", "v_proj"}
    for module, bias in (
        (nn.Linear(3, 4), "bias"),
        (nn.GRU(3, 4), "bias_hh_l0"),
        (nn.MultiheadAttention(4, 2), "in_proj_bias"),
    ):  # the weight is preconditioned as ever
        found = inspect(nn.ModuleDict({"m": prune.identity(module, bias)}))
        assert reasons(found).keys() == {f"m.{bias}_orig"}
        assert bias not in {
            view.attribute for layer in found.layers.values() for view in layer.biases
        }


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


def test_how_the_rest_is_trained():
    """In the optimizer's words."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 2))
    found = inspection.inspect(model, model.parameters(), inputs_alone=True)
    for rest, words in (
        (Rest("AdamW"), ["AdamW"] * 4),
        (Rest("AdamW", matrix="Muon"), ["Muon", "AdamW", "Muon", "AdamW"]),
    ):
        entries = covered(model, found, rest, {"1.weight"})
        assert [entry.rest for entry in entries] == words
