"""What is preconditioned and what is not is said by name, for every parameter."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from tiny import batches, mlp, train
from torch_thor import THOR


def covered(optimizer):
    """Parameter name -> entry."""
    return {entry.name: entry for entry in optimizer.coverage()}


class Everything(nn.Module):
    """One of each kind that a practitioner meets."""

    class Scaled(nn.Linear):
        """A linear layer in name only."""

        def forward(self, x):
            return functional.linear(x, 2 * self.weight, self.bias)

    class Named(nn.Linear):
        """A subclass that computes what its parent computes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer_norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scaled = self.Scaled(6, 6)
        self.named = self.Named(6, 6, bias=False)
        self.bilinear = nn.Bilinear(6, 6, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.conv1d = nn.Conv1d(8, 4, 2)
        self.batch_norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        h = self.embedding(x)
        h = self.layer_norm(h + self.attention(h, h, h)[0]).mean(1)
        h = self.named(torch.tanh(self.scaled(self.frozen(self.linear(h)))))
        h = self.bilinear(h, h) * self.scale
        image = self.grouped(torch.tanh(self.conv(h[:, None, None, :])))
        return self.batch_norm(self.conv1d(image.mean(2)).mean(2))


PRECONDITIONED = {
    "linear.weight": (8, 6),
    "linear.bias": (6,),
    "named.weight": (6, 6),
    "conv.weight": (9, 4),
    "conv.bias": (4,),
    "grouped.weight": (18, 4),
    "grouped.bias": (4,),
    "unused.weight": (3, 3),
    "unused.bias": (3,),
}
PLAIN = [
    "embedding.weight", "attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight",
    "attention.out_proj.bias", "layer_norm.weight", "layer_norm.bias", "scaled.weight", "scaled.bias",
    "bilinear.weight", "bilinear.bias", "scale", "conv1d.weight", "conv1d.bias", "batch_norm.weight",
    "batch_norm.bias",
]  # fmt: skip


def test_every_parameter_is_listed_once_and_in_order():
    model = Everything()
    entries = THOR(model).coverage()
    assert [entry.name for entry in entries] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_preconditioned(name):
    entry = covered(THOR(Everything()))[name]
    assert entry.preconditioned
    assert entry.reason is None
    assert tuple(entry.factor_sizes) == PRECONDITIONED[name]
    assert entry.kind == ("Conv2d" if "conv" in name or "grouped" in name else "Linear")


@pytest.mark.parametrize("name", PLAIN)
def test_plain_with_a_reason(name):
    entry = covered(THOR(Everything()))[name]
    assert not entry.preconditioned
    assert len(entry.reason) > 5


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("attention.in_proj_weight", "MultiheadAttention"),
        ("attention.out_proj.weight", "MultiheadAttention"),
        ("embedding.weight", "Embedding"),
        ("layer_norm.weight", "LayerNorm"),
        ("scaled.weight", "forward"),
    ],
)
def test_reason_says_why(name, word):
    assert word in covered(THOR(Everything()))[name].reason


def test_everything_trains_without_a_warning_for_what_runs():
    """Plain parameters move too, and curvature exists for the layers that run."""
    model = Everything()
    optimizer = THOR(model, update_interval=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        model(torch.randint(11, (6, 5))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        still = name.startswith(("frozen", "unused"))
        assert torch.equal(parameter, before[name]) == still, name
    ran = {name for name, curvature in optimizer.curvature.items() if curvature.refreshes}
    assert ran == {"linear", "named", "conv", "grouped"}


def test_print_shows_it_all():
    text = repr(THOR(Everything()))
    for name in [*PRECONDITIONED, *PLAIN]:
        assert name in text, name
    for word in ("damping", "MultiheadAttention", "LayerNorm", "Conv2d"):
        assert word in text


def test_curvature_has_the_preconditioned_layers_by_module_name():
    optimizer = THOR(Everything())
    assert set(optimizer.curvature) >= {"linear", "named", "conv", "grouped", "unused"}
    assert not set(optimizer.curvature) & {"attention.out_proj", "scaled", "embedding", "bilinear", "conv1d"}
    with pytest.raises(TypeError):
        optimizer.curvature["linear"] = None


def test_a_model_that_is_a_layer_itself():
    model = nn.Linear(5, 3)
    optimizer = THOR(model)
    train(model, optimizer, batches(2, dtype=torch.float32))
    assert [entry.name for entry in optimizer.coverage()] == ["weight", "bias"]
    assert all(entry.preconditioned for entry in optimizer.coverage())
    assert optimizer.curvature[""].refreshes == 1


class Tied(nn.Module):
    """Input embedding and output layer share one matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embedding(x))))


def test_tied_weight_is_listed_once_and_trained_plain():
    """Its gradient is a sum of two layers': no single pair of factors describes it."""
    model = Tied()
    optimizer = THOR(model)
    entries = [entry for entry in optimizer.coverage() if entry.name in ("embedding.weight", "head.weight")]
    assert len(entries) == 1
    assert not entries[0].preconditioned
    assert "embedding.weight" in entries[0].reason
    assert "head.weight" in entries[0].reason
    assert set(optimizer.curvature) == {"body"}
    before = model.head.weight.detach().clone()
    model(torch.tensor([1, 2, 3])).square().mean().backward()
    grad = model.head.weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model.head.weight.detach(), before - 0.05 * grad)


def test_two_linear_layers_that_share_a_weight():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    optimizer = THOR(model)
    assert "0" not in optimizer.curvature
    assert "2" not in optimizer.curvature
    assert "shared" in covered(optimizer)["0.weight"].reason
    assert not covered(optimizer)["0.bias"].preconditioned
    train(model, optimizer, batches(2, dtype=torch.float32))


def test_one_layer_under_two_names_is_one_layer():
    """The same module twice, unlike two modules with one weight, has one input and one output a use."""
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3)).double()
    optimizer = THOR(model)
    assert covered(optimizer)["0.weight"].preconditioned
    train(model, optimizer, batches(1))
    assert optimizer.curvature["0"].rows_per_term == 2


def test_part_of_the_model_in_the_groups():
    """What is in no group is not trained, and said so."""
    model = mlp()
    optimizer = THOR(model[4].parameters(), model=model)
    assert set(optimizer.curvature) == {"4"}
    entries = covered(optimizer)
    assert not entries["0.weight"].preconditioned
    assert "group" in entries["0.weight"].reason
    before = model[0].weight.detach().clone()
    train(model, optimizer, batches(2))
    assert torch.equal(model[0].weight, before)
    assert optimizer.curvature["4"].refreshes == 1


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.LayerNorm(4)),
        nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)),
        nn.MultiheadAttention(8, 2),
        nn.Sequential(nn.Conv1d(2, 2, 1)),
    ],
    ids=["norm", "embedding", "attention", "conv1d"],
)
def test_nothing_to_precondition_is_an_error(model):
    with pytest.raises(ValueError, match="SGD"):
        THOR(model)


def test_lazy_layer_is_named():
    with pytest.raises(ValueError, match=r"1\.weight"):
        THOR(nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)))


def test_transformer_encoder_layer_trains_in_both_modes():
    """Its attention runs fused: in training the two linear layers fire, in evaluation perhaps nothing does."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    optimizer = THOR(layer, update_interval=1)
    x = torch.randn(3, 4, 8)
    layer.eval()
    with torch.no_grad():
        layer(x)
    layer.train()
    for _ in range(2):
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(optimizer.curvature) == {"linear1", "linear2"}
    assert optimizer.curvature["linear1"].rows_per_term == 4


@pytest.mark.parametrize("how", ["weight_norm", "old_weight_norm", "spectral_norm", "pruned"])
def test_reparametrised_weight_is_no_weight(how):
    """The gradient of the factors of a weight is not the gradient that A and G describe."""
    layer = nn.Linear(5, 4)
    if how == "weight_norm":
        layer = nn.utils.parametrizations.weight_norm(layer)
    elif how == "old_weight_norm":
        layer = old_weight_norm(layer)
    elif how == "spectral_norm":
        layer = nn.utils.parametrizations.spectral_norm(layer)
    else:
        layer = prune.l1_unstructured(layer, "weight", 0.5)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))
    optimizer = THOR(model)
    assert set(optimizer.curvature) == {"2"}
    for name, entry in covered(optimizer).items():
        assert entry.preconditioned == name.startswith("2."), name
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, batches(2, dtype=torch.float32))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)
