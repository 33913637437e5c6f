"""ThorMuon steps projections of a fused weight as if each had a weight of its own."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tiny import batches, train, weights
from torch_thor import ThorMuon

pytestmark = pytest.mark.filterwarnings("ignore:ThorMuon preconditions")

SIZES = (6, 2, 3)
STREAM = batches(5)
OPTIONS = {"lr": 0.1, "split_dim": 4, "weight_decay": 0.1, "update_interval": 2}


class Louder(nn.Linear):
    """A linear layer whose forward is not known, so that its matrix has no factors."""

    def forward(self, x):
        return 2 * super().forward(x)


# a layer with so many outputs, and the dimension of its weight that they are
LAYERS = {
    "linear": (lambda outputs: nn.Linear(5, outputs), 0),
    "inputs first": (lambda outputs: Conv1D(outputs, 5), 1),
    "without factors": (lambda outputs: Louder(5, outputs), 0),
    "convolution": (lambda outputs: nn.Conv1d(1, outputs, 5), 0),
}


class Joined(nn.Module):
    """A layer for all outputs, or several layers for some outputs each; then a head."""

    def __init__(self, name, layers):
        super().__init__()
        self.name, self.layers, self.head = name, nn.ModuleList(layers), nn.Linear(sum(SIZES), 3)

    def forward(self, x):
        if self.name == "convolution":
            x = x[:, None]
        return self.head(torch.tanh(torch.cat([layer(x) for layer in self.layers], 1)).flatten(1))


def joined_and_apart(name):
    """(a model with a fused layer, its twin with a layer for each projection)."""
    make, dim = LAYERS[name]
    fused, apart = make(sum(SIZES)), [make(size) for size in SIZES]
    parts = fused.weight.split(SIZES, dim), fused.bias.split(SIZES), apart
    with torch.no_grad():
        for weight, bias, part in zip(*parts, strict=True):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
    model, twin = Joined(name, [fused]), Joined(name, apart)
    twin.head.load_state_dict(model.head.state_dict())
    return model.double(), twin.double(), dim


@pytest.mark.parametrize("ratio", [None, 0.02])
@pytest.mark.parametrize("name", LAYERS)
def test_a_split_layer_steps_as_a_layer_for_each_projection(name, ratio):
    model, twin, dim = joined_and_apart(name)
    before = weights(model)
    for each, splits in ((model, {"layers": SIZES}), (twin, None)):
        train(each, ThorMuon(each, max_update_ratio=ratio, row_splits=splits, **OPTIONS), STREAM)
    own = model.layers[0]
    assert not own.weight.equal(before["layers.0.weight"])
    wanted = torch.cat([layer.weight for layer in twin.layers], dim)
    torch.testing.assert_close(own.weight, wanted, rtol=1e-6, atol=1e-8)
    wanted = torch.cat([layer.bias for layer in twin.layers])
    torch.testing.assert_close(own.bias, wanted, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(model.head.weight, twin.head.weight, rtol=1e-6, atol=1e-8)


def twelve():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3)).double()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(5, 12), nn.Linear(5, 12)
        self.other.weight = self.first.weight


@pytest.mark.parametrize(
    ("make", "pattern", "parameter"),
    [
        (lambda: torch.compile(twelve(), backend="eager"), "0", "0.weight"),
        (Shared, "first", "first.weight"),
        (Shared, "other", "first.weight"),
    ],
)
def test_a_pattern_matches_names_of_layers(make, pattern, parameter):
    entries = ThorMuon(make(), row_splits={pattern: 3}).coverage()
    assert [e.matrices for e in entries if parameter in e.name] == [((4, 5),) * 3]


def test_a_number_is_of_equal_projections_and_the_last_pattern_counts():
    thirds, whole = ((4, 5),) * 3, ((12, 5),)
    for splits, shapes in (
        ({"0": 3}, thirds),
        ({"0": [4, 4, 4]}, thirds),
        ({"*": 1, "0": 3}, thirds),
        ({"0": 3, "*": 1}, whole),
    ):
        assert ThorMuon(twelve(), row_splits=splits).coverage()[0].matrices == shapes


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (3, r"row_splits=3: row_splits must be None or a dict"),
        ({"nosuch": 3}, "'nosuch' matches no layer"),
        ({"0": 5}, "sizes must add up to the 12 outputs of layer '0', and a number must divide"),
        ({"0": (4, 4)}, "add up to the 12"),
    ],
)
def test_splits_that_do_not_fit_are_refused(splits, message):
    with pytest.raises(ValueError, match=message):
        ThorMuon(twelve(), row_splits=splits)
