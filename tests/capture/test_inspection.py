"""What a model is found to hold: layers, who shares what, and why the rest has no factors."""

import pytest
import torch
from torch import nn

from torch_thor import THOR, ThorMuon
from torch_thor.capture.reasons import NOT_TRAINED

WITHOUT_WEIGHT = "the weight of its layer is not preconditioned"


def reasons(optimizer):
    return {entry.name: entry.reason for entry in optimizer.coverage() if entry.reason}


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
    """The norm of a library: known by its name and its vectors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Experts(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


ALIKE = {"a.in_proj_weight": "shared by 'a.in_proj_weight', 'b.in_proj_weight'"}
ALIKE |= {"a.in_proj_bias": WITHOUT_WEIGHT, "b.in_proj_bias": WITHOUT_WEIGHT}
LOOSE = {"1.scale": "belongs to no layer inside Experts"}
EXPERTS = {"up": (3, 6, 4), "up_bias": (3, 6), "down": (3, 4, 6), "scale": (3,)}
NORM = {"1.weight": "a normalisation layer", "1.bias": "a normalisation layer"}
TIED = "the weight of its layer is preconditioned as the weight of '0', with another G"
# what a model is, its layers, and why the other parameters have no factors
CASES = [
    (shared(nn.Linear(4, 4), nn.Linear(4, 4)), ["0"], {}),
    (shared_bias(), ["0"], {"0.bias": "shared by '0.bias', '1.bias'"}),
    (shared(nn.Embedding(7, 4), nn.Linear(4, 7)), ["0"], {"1.bias": TIED}),
    (shared_attentions(), ["a.out_proj", "b.out_proj"], ALIKE),
    (behind_a_layer(nn.LayerNorm(4)), ["0"], NORM),
    (behind_a_layer(ModelRMSNorm()), ["0"], {"1.weight": NORM["1.weight"]}),
    (behind_a_layer(Experts(**EXPERTS)), ["0", "1.up", "1.down"], LOOSE),
    # a position embedding is no expert
    (behind_a_layer(Experts(places=(1, 6, 4))), ["0"], {"1.places": "no curvature for Experts"}),
]


@pytest.mark.filterwarnings("ignore:THOR preconditions")
@pytest.mark.parametrize(("model", "layers", "why"), CASES)
def test_layers_and_why_the_rest_has_no_factors(model, layers, why):
    optimizer = THOR(model)
    assert list(optimizer.curvature) == layers
    assert reasons(optimizer) == why


def test_what_the_optimizer_has_not():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = THOR(model[1].parameters(), model=model)
    assert set(optimizer.curvature) == {"1"}
    assert reasons(optimizer) == {"0.weight": NOT_TRAINED, "0.bias": NOT_TRAINED}
    assert [entry.trained for entry in optimizer.coverage()] == [False, False, True, True]
    with pytest.raises(ValueError, match=r"parameter '0.weight' has no shape yet; run one batch"):
        THOR(nn.Sequential(nn.LazyLinear(3)))


def test_thor_muon_preconditions_neither_embeddings_nor_biases():
    optimizer = ThorMuon(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)))
    assert set(optimizer.curvature) == {"1"}
    wanted = {"0.weight": "the input factor is diagonal", "1.bias": "no matrix"}
    assert reasons(optimizer) == wanted
