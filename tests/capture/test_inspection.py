"""What a model is found to hold: layers, who shares what, and why the rest has no factors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
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


BOTH = "shared by '0.weight', '1.weight'"
ALIKE = {"a.in_proj_weight": "shared by 'a.in_proj_weight', 'b.in_proj_weight'"}
ALIKE |= {"a.in_proj_bias": WITHOUT_WEIGHT, "b.in_proj_bias": WITHOUT_WEIGHT}
LOOSE = {"1.scale": "belongs to no layer inside Experts"}
EXPERTS = {"up": (3, 6, 4), "up_bias": (3, 6), "down": (3, 4, 6), "scale": (3,)}
NORM = {"1.weight": "a normalisation layer", "1.bias": "a normalisation layer"}
TIED = "the weight of its layer is preconditioned as that of '0', with another G"
# what a model is, its layers, and why the other parameters have no factors
CASES = [
    (shared(nn.Linear(4, 4), nn.Linear(4, 4)), ["0"], {}),
    (shared_bias(), ["0"], {"0.bias": "shared by '0.bias', '1.bias'"}),
    (shared(nn.Embedding(7, 4), nn.Linear(4, 7)), ["0"], {"1.bias": TIED}),
    # neither of one geometry, nor an embedding and its decoders
    (shared(nn.Embedding(7, 4), Conv1D(4, 7)), [], {"0.weight": BOTH, "1.bias": WITHOUT_WEIGHT}),
    (shared_attentions(), ["a.out_proj", "b.out_proj"], ALIKE),
    (behind_a_layer(nn.LayerNorm(4)), ["0"], NORM),
    (behind_a_layer(nn.BatchNorm1d(4)), ["0"], NORM),
    (behind_a_layer(ModelRMSNorm()), ["0"], {"1.weight": NORM["1.weight"]}),
    (behind_a_layer(ModelRMSNorm((4, 4))), ["0"], {"1.weight": "no curvature for ModelRMSNorm"}),
    (behind_a_layer(Experts(**EXPERTS)), ["0", "1.up", "1.down"], LOOSE),
    # a position embedding is no expert
    (behind_a_layer(Experts(places=(1, 6, 4))), ["0"], {"1.places": "no curvature for Experts"}),
]


@pytest.mark.parametrize(("model", "layers", "why"), CASES)
def test_layers_and_why_the_rest_has_no_factors(model, layers, why):
    found = inspect(model)
    assert list(found.layers) == layers
    assert reasons(found) == why


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


def test_without_g():
    """ThorMuon takes only A: of no embeddings, and of no biases."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    found = inspect(model, inputs_alone=True)
    assert set(found.layers) == {"1"}
    assert found.layers["1"].biases == []
    assert reasons(found) == {"0.weight": "the input factor is diagonal", "1.bias": "no matrix"}
    assert found.entries[1].factor_sizes == (4,)
