"""What is preconditioned and what is not is said by name, for every parameter."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from tiny import mlp
from torch_thor import THOR


class Scaled(nn.Linear):
    """A linear layer in name only."""

    def forward(self, x):
        return functional.linear(x, 2 * self.weight, self.bias)


class Named(nn.Linear):
    """A subclass that computes what its parent computes."""


class Everything(nn.Module):
    """One of each kind that a practitioner meets."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer_norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scaled = Scaled(6, 6)
        self.named = Named(6, 6, bias=False)
        self.bilinear = nn.Bilinear(6, 6, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.transposed = nn.ConvTranspose1d(8, 4, 3)
        self.batch_norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(3, 3)


# name: kind and factor sizes; groups where there are several
PRECONDITIONED = {
    "embedding.weight": ("Embedding", (11, 8)),
    "attention.in_proj_weight": ("MultiheadAttention", (8, 8), 3),
    "attention.in_proj_bias": ("MultiheadAttention", (8,), 3),
    "attention.out_proj.weight": ("MultiheadAttention", (8, 8)),
    "attention.out_proj.bias": ("MultiheadAttention", (8,)),
    "linear.weight": ("Linear", (8, 6)),
    "linear.bias": ("Linear", (6,)),
    "named.weight": ("Linear", (6, 6)),
    "grouped.weight": ("Conv2d", (18, 4), 2),
    "grouped.bias": ("Conv2d", (4,), 2),
    "transposed.weight": ("ConvTranspose1d", (24, 4)),
    "transposed.bias": ("ConvTranspose1d", (4,)),
    "unused.weight": ("Linear", (3, 3)),
    "unused.bias": ("Linear", (3,)),
}
# name of a parameter or of its module: the reason
PLAIN = {
    "layer_norm": "a normalisation layer",
    "batch_norm": "a normalisation layer",
    "frozen": "frozen",
    "scaled": "overrides the forward of Linear",
    "bilinear": "no curvature for Bilinear",
    "scale": "Everything",
}


def test_every_parameter_is_listed_once_and_in_order():
    model = Everything()
    optimizer = THOR(model)
    assert [entry.name for entry in optimizer.coverage()] == [name for name, _ in model.named_parameters()]
    for entry in optimizer.coverage():
        found = (entry.kind, tuple(entry.factor_sizes or ()), entry.groups)
        if entry.preconditioned:
            assert found == (*PRECONDITIONED[entry.name], 1)[:3]
            assert entry.reason is None
        else:
            assert entry.name not in PRECONDITIONED
            assert entry.factor_sizes is None or not entry.trained
            assert PLAIN[entry.name.removesuffix(".weight").removesuffix(".bias")] in entry.reason
        assert entry.name in repr(optimizer)
    with pytest.raises(TypeError):
        optimizer.curvature["linear"] = None
    for word in ("damping", "MultiheadAttention", "Conv2d", "8 x 8 x 3 groups", "a normalisation layer", "11 x 8"):
        assert word in repr(optimizer)


def test_print_lists_the_options_of_each_group_and_nothing_that_is_internal():
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2:].parameters()}]
    lines = repr(THOR(groups, model=model, lr=0.1)).splitlines()
    assert lines[:4] == ["THOR (", "Parameter Group 0", "    lr: 0.2", "    damping: 0.03"]
    second = lines[lines.index("Parameter Group 1") + 1 : lines.index(")")]
    assert second[0] == "    lr: 0.1"
    assert {line.split(":")[0].strip() for line in second} <= set(inspect.signature(THOR).parameters)


def test_a_model_that_is_a_layer_itself_and_is_called_by_keyword():
    model = nn.Linear(5, 3)
    optimizer = THOR(model)
    model(input=torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    assert [(entry.name, entry.preconditioned) for entry in optimizer.coverage()] == [("weight", True), ("bias", True)]
    assert optimizer.curvature[""].refreshes == 1


def test_nothing_to_precondition_is_an_error():
    for model in (
        nn.Sequential(nn.LayerNorm(4)),
        nn.Bilinear(4, 4, 4),
        nn.Sequential(Scaled(4, 4)),
        nn.Sequential(nn.Embedding(4, 4, scale_grad_by_freq=True)),
    ):
        with pytest.raises(ValueError, match="SGD"):
            THOR(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reparametrised_weight_is_no_weight():
    """The gradient of the factors of a weight is not the gradient that A and G describe."""
    for parametrised in (
        nn.utils.parametrizations.weight_norm,
        nn.utils.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ):
        model = nn.Sequential(parametrised(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))
        with pytest.warns(UserWarning, match="preconditions 15 of"):
            entries = THOR(model).coverage()
        assert {entry.name for entry in entries if entry.preconditioned} == {"2.weight", "2.bias"}
