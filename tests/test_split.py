"""The choice of the split dimension: crossings by hand, and whole models."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import every_kind
from comparing import refreshed
from tiny import as_list, assert_same, cross_entropy
from torch_thor import THOR, SplitChoice, choose_split_dim, split
from torch_thor.split import find_crossing

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("split_dims", "performance", "information", "expected"),
    [
        ((1, 16, 64), (1.0, 0.75, 0.25), (0.0, 0.25, 0.75), 32.0),  # half way between 2^4 and 2^6
        ((1, 16, 32), (1.0, 0.5, 0.2), (0.1, 0.4, 0.5), 2 ** (4 + 0.1 / 0.4)),
        ((1, 16, 32), (1.0, 0.5, 0.2), (0.1, 0.5, 0.6), 16.0),  # level at a candidate
        ((1, 16), (1.0, 0.5), (1.0, 1.0), 1.0),  # nothing is lost at all
        ((1, 16, 32), (1.0, 3.0, 1.5), (0.1, 0.2, 1.0), None),  # even unsplit is cheap
        # noise: below at 16, above again at 32, below for good at 64
        ((1, 16, 32, 64), (1.0, 0.3, 0.5, 0.2), (0.0, 0.4, 0.4, 0.5), 2**5.25),
    ],
)
def test_crossings_by_hand(split_dims, performance, information, expected):
    found = find_crossing(split_dims, performance, information)
    assert found == (None if expected is None else pytest.approx(expected))


class Net(nn.Module):
    """Convolutions with and without groups, BatchNorm, dropout, and a layer called twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 20, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(20, 8, 2, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, images):
        x = self.norm(F.relu(self.grouped(F.relu(self.conv(images)))))
        x = self.drop(x).mean((2, 3))
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


def sample():
    generator = torch.Generator().manual_seed(3)
    images = torch.randn((6, 4, 9, 9), generator=generator, dtype=torch.float64) + 0.5
    return images, torch.randint(0, 3, (6,), generator=generator)


def dense_loss(factor, split_dim):
    """1 - |Â| / |A| from the definition, groups one below the other."""
    groups = as_list(factor)
    index = torch.cat(
        [torch.arange(len(group)) // split_dim + 1000 * g for g, group in enumerate(groups)]
    )
    whole = torch.block_diag(*groups)
    cut = torch.where(index[:, None] == index[None, :], whole, torch.zeros_like(whole))
    return 1 - float(torch.linalg.matrix_norm(cut, ord=2) / torch.linalg.matrix_norm(whole, ord=2))


@pytest.fixture
def asked(monkeypatch):
    """Replaces the measured times by the block sizes; holds what was asked for."""
    seen = []

    def seconds(sizes, split_dims, **options):
        seen.append((sorted(sizes), split_dims, options))
        return tuple(map(float, split_dims))

    monkeypatch.setattr(split, "inverse_seconds", seconds)
    return seen


def test_losses_shares_and_choice_of_a_model(asked):
    model = Net().double()
    images, labels = sample()
    with torch.random.fork_rng():
        curvature = refreshed(
            copy.deepcopy(model), images, cross_entropy(labels), split_dim=None
        ).curvature
    found = choose_split_dim(model, (images, labels))
    assert isinstance(found, SplitChoice)
    assert found.candidates == (1, 16, 32, 40)
    assert list(found.losses) == ["conv", "grouped", "twice", "head"]
    sizes = [(1, 36), (1, 20), (2, 40), (2, 4), (1, 8), (1, 8), (1, 8), (1, 3)]
    assert asked == [(sorted(sizes), (1, 16, 32, 40), {"dtype": torch.float64, "device": CPU})]
    kept = []
    for name, factors in found.losses.items():
        for key, each in zip("AG", curvature[name].factors(), strict=True):
            expected = [dense_loss(each, s) for s in found.candidates]
            assert factors[key] == pytest.approx(expected, abs=2e-3), (name, key)
            kept.append([loss < 0.01 for loss in expected])
    assert found.information == tuple(sum(column) / 8 for column in zip(*kept, strict=True))
    assert found.performance == pytest.approx((1, 1 / 16, 1 / 32, 1 / 40))
    # by hand: kept are 0, 5/8 (A and G of twice and head but for G of conv 20 > 16), ..., so they
    # cross below 16
    assert found.information[0] <= 0.25
    assert found.information[1:] == (0.625, 0.75, 1.0)
    p, i = found.performance, found.information
    assert found.crossing == pytest.approx(16 ** ((p[0] - i[0]) / (p[0] - i[0] - p[1] + i[1])))
    assert found.split_dim == 16


def test_for_thor_muon_only_a_counts_and_the_orthogonalisation_is_timed(monkeypatch, asked):
    model = Net().double()
    both = choose_split_dim(model, sample())
    timed = []

    def orthogonal(shapes, split_dims, **options):
        timed.append((shapes, split_dims, options))
        return (100.0,) * len(split_dims)

    monkeypatch.setattr(split, "orthogonal_seconds", orthogonal)
    found = choose_split_dim(model, sample(), optimizer="thor-muon")
    # A has the same losses as for THOR, because it has the same rows
    assert found.losses == {name: {"A": own["A"]} for name, own in both.losses.items()}
    sizes, split_dims, options = asked[-1]
    assert sizes == sorted([(1, 36), (2, 40), (1, 8), (1, 8)])
    assert timed == [([(1, 20, 36), (2, 4, 40), (1, 8, 8), (1, 3, 8)], split_dims, options)]
    assert found.seconds == tuple(100 + size for size in split_dims)


def everything_of(model):
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [(len(m._forward_hooks), m.training) for m in model.modules()]
    return state, gradients, modes, torch.get_rng_state()


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("optimizer", ["thor", "thor-muon"])
def test_the_model_and_the_random_numbers_stay_as_they_were(optimizer):
    model = Net().double()
    images, labels = sample()
    F.cross_entropy(model(images), labels).backward()  # gradients that must stay
    model.norm.eval()  # modes need not be the same everywhere
    before = everything_of(model)
    with torch.no_grad():
        choose_split_dim(model, (images, labels), optimizer=optimizer)
    assert_same(everything_of(model), before)


class Worded(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 2)

    def forward(self, x, *, scale):
        return {"loss": self.fc(input=x * scale).square().sum()}


def losses_with(model, batch, **options):
    return choose_split_dim(model, batch, "cpu", **options).losses


@pytest.mark.usefixtures("asked")
def test_batches_and_losses_of_the_user():
    x, worded = torch.randn(5, 6), Worded()
    by_name = losses_with(worded, {"x": x / 2, "scale": 2.0}, loss_fn=lambda output: output["loss"])
    linear = nn.Sequential(worded.fc)
    by_itself = losses_with(linear, x, loss_fn=lambda output: output.square().sum())
    by_position = losses_with(
        linear, ((x,), torch.zeros(5, 2)), loss_fn=lambda y, t: (y - t).square().sum()
    )
    assert by_name["fc"] == by_itself["0"] == by_position["0"]


def test_layers_that_count_are_those_of_the_optimizer(asked):
    # the A of an embedding is diagonal
    embedding = nn.Sequential(nn.Embedding(500, 20), nn.Flatten(), nn.Linear(60, 4))
    found = choose_split_dim(embedding, torch.randint(0, 500, (7, 3)))
    assert found.candidates == (1, 16, 32, 60)
    named = {name: list(factors) for name, factors in found.losses.items()}
    assert named == {"0": ["G"], "2": ["A", "G"]}
    model, tokens = every_kind.build(), every_kind.stream()[-1][0]
    found = losses_with(model, tokens, loss_fn=lambda y: y.square().mean())
    assert set(found) == set(THOR(model).curvature)


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "said"),
    [
        (nn.BatchNorm1d(3), torch.ones(2, 3), None, "BatchNorm1d has no layer .*give a model"),
        (nn.Linear(3, 2), torch.ones(2, 3) / 0, torch.sum, "factor A of layer '' holds NaN or inf"),
        (nn.Conv2d(3, 2, 1), torch.ones(2, 3, 4, 4), None, "the model must return class scores"),
    ],
)
def test_what_cannot_be_measured(model, batch, loss_fn, said):
    with pytest.raises(ValueError, match=said):
        choose_split_dim(model, batch, loss_fn=loss_fn)


def test_times_are_measured_on_this_machine():
    model = nn.Sequential(nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 4))
    found = choose_split_dim(model, torch.randn(64, 50))
    assert found.split_dim in found.candidates == (1, 16, 32, 50)
    assert all(each > 0 for each in found.seconds)
    assert "1 thread" in found.device
    assert found.as_dict()["split_dim"] == found.split_dim
