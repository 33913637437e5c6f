"""The choice of the split dimension: crossings, spectral losses and times, and whole models."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import every_kind
from comparing import refreshed
from tiny import as_list, assert_same, cross_entropy
from torch_thor import THOR, SplitChoice, choose_split_dim, split
from torch_thor.curvature import Blocks, BlockSizes, Layer, LayerCurvature, ParameterView
from torch_thor.curvature.kinds import kind_of
from torch_thor.curvature.layer import Statistics
from torch_thor.split import (
    candidates,
    device_name,
    find_crossing,
    inverse_seconds,
    invert,
    largest_eigenvalues,
    nearest,
    orthogonal_seconds,
    processor_name,
    spectral_losses,
)

CPU = torch.device("cpu")
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def test_crossings_by_hand():
    for split_dims, performance, information, expected in (
        ((1, 16, 64), (1.0, 0.75, 0.25), (0.0, 0.25, 0.75), 32.0),  # half way between 2^4 and 2^6
        ((1, 16, 32), (1.0, 0.5, 0.2), (0.1, 0.4, 0.5), 2 ** (4 + 0.1 / 0.4)),
        ((1, 16, 32), (1.0, 0.5, 0.2), (0.1, 0.5, 0.6), 16.0),  # level at a candidate
        ((1, 16), (1.0, 0.5), (1.0, 1.0), 1.0),  # nothing is lost at all
        ((1, 16, 32), (1.0, 3.0, 1.5), (0.1, 0.2, 1.0), None),  # even unsplit is cheap
        ((1, 16, 32), (1.0, 0.9, 1.0), (0.1, 0.2, 1.0), None),  # level at the end
        ((1,), (1.0,), (1.0,), None),
        # noise: below at 16, above again at 32, below for good at 64
        ((1, 16, 32, 64), (1.0, 0.3, 0.5, 0.2), (0.0, 0.4, 0.4, 0.5), 2**5.25),
    ):
        found = find_crossing(split_dims, performance, information)
        assert found == (None if expected is None else pytest.approx(expected))
    for crossing, expected in ((106.0, 128), (91.0, 128), (90.0, 64), (1.0, 1), (4608.0, 4608)):
        assert nearest((1, 16, 32, 64, 128, 4608), crossing) == expected


def test_candidates():
    for inputs, outputs, expected in (
        (1, 1, (1,)),
        (16, 3, (1, 16)),
        (3, 17, (1, 16, 17)),
        (100, 10, (1, 16, 32, 64, 100)),
        (9000, 1, (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    ):
        module = nn.Linear(inputs, outputs, device="meta")
        layer = Layer("", kind_of(module), ParameterView(module, "weight"), [])
        assert candidates([LayerCurvature(layer)]) == expected


class Net(nn.Module):
    """A convolution with groups, one without, BatchNorm, dropout, and a layer called twice."""

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
        [torch.arange(len(one)) // split_dim + 1000 * g for g, one in enumerate(groups)]
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
    options = {"dtype": torch.float64, "device": torch.device("cpu")}
    assert asked == [(sorted(sizes), (1, 16, 32, 40), options)]
    kept = []
    for name, factors in found.losses.items():
        assert list(factors) == ["A", "G"]
        for key, each in zip("AG", curvature[name].factors(), strict=True):
            expected = [dense_loss(each, s) for s in found.candidates]
            assert factors[key] == pytest.approx(expected, abs=2e-3), (name, key)
            kept.append([loss < 0.01 for loss in expected])
    assert found.information == tuple(sum(column) / 8 for column in zip(*kept, strict=True))
    assert found.performance == pytest.approx((1, 1 / 16, 1 / 32, 1 / 40))
    assert found.seconds == (1.0, 16.0, 32.0, 40.0)
    # by hand: kept are 0, 5/8 (A and G of twice and head but for G of conv 20 > 16), ..., so they
    # cross below 16
    assert found.information[0] <= 0.25
    assert found.information[1:] == (0.625, 0.75, 1.0)
    p, i = found.performance, found.information
    assert found.crossing == pytest.approx(16 ** ((p[0] - i[0]) / (p[0] - i[0] - p[1] + i[1])))
    assert found.split_dim == 16


def test_for_thor_muon_a_alone_counts_and_the_orthogonalisation_is_timed(monkeypatch, asked):
    model = Net().double()
    images, labels = sample()
    both = choose_split_dim(model, (images, labels))
    timed = []

    def orthogonal(shapes, split_dims, **options):
        timed.append((shapes, split_dims, options))
        return (100.0,) * len(split_dims)

    monkeypatch.setattr(split, "orthogonal_seconds", orthogonal)
    found = choose_split_dim(model, (images, labels), optimizer="thor-muon")
    # the losses of A are those of THOR, whose A has the same rows
    assert found.losses == {name: {"A": own["A"]} for name, own in both.losses.items()}
    sizes, split_dims, options = asked[-1]
    assert sizes == sorted([(1, 36), (2, 40), (1, 8), (1, 8)])
    assert timed == [([(1, 20, 36), (2, 4, 40), (1, 8, 8), (1, 3, 8)], split_dims, options)]
    assert found.seconds == tuple(100 + size for size in split_dims)


def everything_of(model):
    grads = {
        name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()
    ]
    return state, grads, hooks, [id(p) for p in model.parameters()], torch.get_rng_state()


def failing(output, targets):
    raise ZeroDivisionError("in the loss")


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("optimizer", ["thor", "thor-muon"])
def test_the_model_and_the_random_numbers_stay_as_they_were(optimizer):
    model = Net().double()
    images, labels = sample()
    F.cross_entropy(model(images), labels).backward()  # gradients that must stay
    model.conv.bias.grad = None
    model.norm.eval()  # modes need not be the same everywhere
    model.head.register_forward_hook(lambda *_: None)
    before = everything_of(model)
    with torch.no_grad():
        choose_split_dim(model, (images, labels), optimizer=optimizer)
        with pytest.raises(ZeroDivisionError):
            choose_split_dim(model, (images, labels), loss_fn=failing, optimizer=optimizer)
    assert_same(everything_of(model), before)


@pytest.mark.usefixtures("asked")
def test_at_most_one_layers_factors_are_alive(monkeypatch):
    model, alive, most = nn.Sequential(*[nn.Linear(9, 9) for _ in range(4)]), set(), []
    really_gather, really_take = Statistics.gather, Statistics.take

    def gather(statistics, *rows):
        really_gather(statistics, *rows)
        alive.add(id(statistics))
        most.append(len(alive))

    def take(statistics, loss_terms):
        alive.discard(id(statistics))
        return really_take(statistics, loss_terms)

    monkeypatch.setattr(Statistics, "gather", gather)
    monkeypatch.setattr(Statistics, "take", take)
    assert len(choose_split_dim(model, torch.randn(5, 9)).losses) == 4
    assert most == [1, 1, 1, 1]


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
    alone = losses_with(linear, x, loss_fn=lambda output: output.square().sum())
    by_position = losses_with(
        linear, ((x,), torch.zeros(5, 2)), loss_fn=lambda y, t: (y - t).square().sum()
    )
    assert by_name["fc"] == alone["0"] == by_position["0"]
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    nn.init.zeros_(model.weight)
    # class 0 is certain, and a drawn label leaves no gradient
    model.bias.data = torch.tensor([50.0, -50.0])
    assert losses_with(model, x)[""]["G"] == (0.0, 0.0)
    given = losses_with(model, (x, torch.ones(8, dtype=torch.long)))[""]["G"]
    assert given[0] == pytest.approx(0.5, abs=1e-5)  # G of two classes is c * [[1, -1], [-1, 1]]


class Wasteful(nn.Module):
    """The loss reaches one of two calls."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(20, 3)

    def forward(self, x):
        self.fc(x.flip(0))
        return self.fc(x)


def test_which_layers_and_calls_count(asked):
    model, x = Wasteful(), torch.randn(6, 20)
    expected, optimizer = losses_with(model.fc, (x, LABELS))[""], THOR(model)
    assert losses_with(model, (x, LABELS))["fc"] == expected
    assert optimizer.curvature["fc"].statistics.rows == 0
    frozen = nn.Sequential(nn.Linear(40, 4), nn.Linear(4, 2))
    frozen[0].weight.requires_grad_(False)
    found = choose_split_dim(frozen, torch.randn(5, 40))
    assert (list(found.losses), found.candidates) == (["1"], (1, 4))
    # its A is diagonal
    embedding = nn.Sequential(nn.Embedding(500, 20), nn.Flatten(), nn.Linear(60, 4))
    found = choose_split_dim(embedding, torch.randint(0, 500, (7, 3)))
    assert found.candidates == (1, 16, 32, 60)
    assert {name: list(factors) for name, factors in found.losses.items()} == {
        "0": ["G"],
        "2": ["A", "G"],
    }
    assert asked[-1][0] == [(1, 4), (1, 20), (1, 60)]
    model, tokens = every_kind.build(), every_kind.stream()[-1][0]
    assert set(losses_with(model, tokens, loss_fn=lambda y: y.square().mean())) == set(
        THOR(model).curvature
    )


X = torch.ones(2, 3)
NORM = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "said"),
    [
        (nn.BatchNorm1d(3), X, None, "BatchNorm1d has no layer .*give a model"),
        (nn.Linear(3, 2), X * torch.inf, torch.sum, "factor A of layer '' holds NaN or inf"),
        (nn.Conv2d(3, 2, 1), torch.ones(2, 3, 4, 4), None, "the model must return class scores"),
        (NORM, X, lambda y: torch.ones(1, requires_grad=True), "no gradient in any layer"),
    ],
)
def test_what_cannot_be_measured(model, batch, loss_fn, said):
    with pytest.raises(ValueError, match=said):
        choose_split_dim(model, batch, loss_fn=loss_fn)
    with pytest.raises(ValueError, match="optimizer='sgd' splits no factors; give thor-muon or"):
        choose_split_dim(model, batch, optimizer="sgd")


def test_measured_for_real():
    model = nn.Sequential(nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 4))
    found = choose_split_dim(model, torch.randn(64, 50))
    assert found.split_dim in found.candidates == (1, 16, 32, 50)
    assert all(each > 0 for each in found.seconds)
    assert "thread" in found.device
    assert found.as_dict()["split_dim"] == found.split_dim


# ---- spectral losses -----------------------------------------------------------------------------


def wishart(n, rows):
    x = torch.randn(n, rows, dtype=torch.float64)
    return x @ x.T / rows


def with_spectrum(values):
    orthogonal = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return orthogonal @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ orthogonal.T


MATRICES = {
    "flat spectrum": lambda: wishart(300, 3000),
    "low rank": lambda: wishart(200, 7),
    "zero": lambda: torch.zeros(40, 40, dtype=torch.float64),
    "a double top": lambda: with_spectrum([5.0, 5.0, *(0.01 * i for i in range(90))]),
    "a lonely top": lambda: with_spectrum([1e6, *([1.0] * 99)]),
}


def test_equals_the_dense_eigenvalue_and_draws_no_random_number_of_the_callers():
    for name, make in MATRICES.items():
        matrix = make()
        expected, before = torch.linalg.eigvalsh(matrix)[-1:], torch.get_rng_state()
        for dtype in (torch.float64, torch.float32):
            found = largest_eigenvalues(matrix[None].to(dtype)).double()
            torch.testing.assert_close(
                found, expected, rtol=1e-3, atol=0 if name != "zero" else 1e-30, msg=name
            )
        assert torch.equal(torch.get_rng_state(), before)


def factor(samples):
    groups, size, rows = samples.shape
    matrix = Blocks(BlockSizes.of(size, None, groups), samples.new_zeros(groups * size, size))
    matrix.add_second_moment_(samples / rows**0.5)
    return matrix


def test_losses_by_hand():
    samples = torch.zeros(1, 10, 4)
    samples[:, 8:] = 1.0  # all of it in rows 8 and 9: blocks of 4 end with a block of those two
    assert spectral_losses(factor(samples), (4, 3)) == pytest.approx((0.0, 0.5), abs=1e-6)
    assert spectral_losses(factor(torch.zeros(1, 8, 3)), (1, 4, 8)) == (0.0, 0.0, 0.0)
    # the eigenvalues of a diagonal lie close, so that the whole is found a little too small, and
    # each block exactly
    matrix = factor(torch.diag(torch.linspace(0.9, 1.0, 2000, dtype=torch.float64).sqrt())[None])
    assert largest_eigenvalues(matrix.parts[0]) < matrix.rows.diagonal().amax()
    assert spectral_losses(matrix, (1, 16)) == (0.0, 0.0)


# ---- times; no test asks the clock itself --------------------------------------------------------


def test_all_blocks_of_one_size_are_inverted_at_once_and_the_median_counts(monkeypatch):
    """Each call takes what the script says for its block size; the first round is left out."""
    calls, clock = [], [0.0]

    def measured(script, sizes, split_dims):
        def invert(blocks):
            left = script[blocks.shape[-1]]
            clock[0] += left.pop(0) if len(left) > 1 else left[0]
            calls.append(tuple(blocks.shape))

        monkeypatch.setattr(split, "invert", invert)
        return inverse_seconds(sizes, split_dims, dtype=torch.float32, device=CPU)

    monkeypatch.setattr(split.time, "perf_counter", lambda: clock[0])
    script, sizes = {1: [5.0], 2: [7.0], 4: [11.0], 10: [17.0]}, [(1, 10), (3, 4)]
    assert measured(script, sizes, (1, 4, 10)) == (5.0, 7.0 + 11.0, 11.0 + 17.0)
    assert calls[0] == (10 + 12, 1, 1)
    assert sorted(calls[1:3]) == [(1, 2, 2), (5, 4, 4)]
    assert sorted(calls[3:5]) == [(1, 10, 10), (3, 4, 4)]
    assert measured({4: [100.0, 3.0, 1.0, 50.0, 4.0, 2.0]}, [(1, 8)], (4,)) == (3.0,)


def test_matrices_are_orthogonalised_laid_wide_in_blocks_of_each_candidate(monkeypatch):
    calls, clock = [], [0.0]

    def unit_polars(matrices, rows):
        clock[0] += rows
        calls.append(([tuple(matrix.shape) for matrix in matrices], rows))

    monkeypatch.setattr(split.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(split, "unit_polars", unit_polars)
    found = orthogonal_seconds([(1, 10, 4), (2, 3, 5)], (1, 4), dtype=torch.float32, device=CPU)
    assert found == (1.0, 4.0)
    assert calls[:2] == [([(1, 4, 10), (2, 3, 5)], 1), ([(1, 4, 10), (2, 3, 5)], 4)]


def test_what_is_timed_is_the_inverse_on_a_named_device():
    for size in (1, 5, 64):
        blocks = torch.eye(size, dtype=torch.float64).add(1 / size).repeat(3, 1, 1)
        expected = torch.eye(size, dtype=torch.float64).expand(3, size, size)
        torch.testing.assert_close(invert(blocks) @ blocks, expected)
    assert device_name(CPU) == f"{processor_name()}, 1 thread"
