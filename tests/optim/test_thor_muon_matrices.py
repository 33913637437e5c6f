"""The step of ThorMuon of what is a matrix and has no factors, and what eigenvalues that are not found do to it."""

import copy
import math

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, mlp, train, weights
from torch_thor import ThorMuon, split_rows

LR = 0.1
ADAMW_SHARE = 0.2  # of lr, for what is no matrix


class Louder(nn.Conv2d):
    """A convolution whose forward THOR does not know."""

    def forward(self, x):
        return 2 * super().forward(x)


class LouderTranspose(nn.ConvTranspose1d):
    """And its transpose."""

    def forward(self, x):
        return 2 * super().forward(x)


class Odd(nn.Module):
    """One layer with factors; the rest has none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.louder = Louder(4, 6, 3, groups=2, bias=False)
        self.transposed = LouderTranspose(4, 6, 3, groups=2, bias=False)
        self.bilinear = nn.Bilinear(5, 4, 3)
        self.table = nn.Parameter(torch.randn(7, 3))
        self.positions = nn.Parameter(torch.randn(1, 4, 3))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.column = nn.Parameter(torch.randn(9, 1))
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm((3, 4))
        self.head = nn.Linear(5, 2, bias=False)


# parameter -> its matrices, by hand
MATRICES = {
    "louder.weight": lambda w: w.reshape(2, 3, 18),
    "transposed.weight": lambda w: torch.stack([w[:2], w[2:]]).transpose(1, 2).reshape(2, 3, 6),
    "bilinear.weight": lambda w: w,
    "table": lambda w: w[None],
    "positions": lambda w: w,
}
NO_MATRIX = ("linear.bias", "bilinear.bias", "token", "column", "embedding.weight", "norm.weight", "norm.bias")


def polar_factors(matrices, size=1000):
    """Of blocks of rows, of tall matrices of columns; by singular values."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return polar_factors(matrices.mT, size).mT
    parts = []
    for block in matrices.double().split(size, dim=-2):
        left, _, right = torch.linalg.svd(block, full_matrices=False)
        parts.append(left @ right)
    return torch.cat(parts, dim=-2)


def with_norm_of_a_step(matrices):
    rows, columns = matrices.shape[-2:]
    norm = math.sqrt(min(rows, columns) * max(1.0, rows / columns))
    return matrices * (norm / torch.linalg.matrix_norm(matrices, keepdim=True))


def one_step(**options):
    """A model, its optimizer before the step, gradients of all parameters."""
    model = Odd()
    optimizer = ThorMuon(model, lr=LR, max_update_ratio=None, **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model.linear.weight.grad = model.head.weight.grad = None  # no forward pass, so no statistics
    return model, optimizer


@pytest.mark.filterwarnings("ignore:ThorMuon preconditions")
def test_the_first_step_of_what_has_no_factors():
    """Matrices: u = ∇ + μ ∇, orthogonalised and given the norm of their shape; what is no matrix: AdamW's."""
    for split_dim in (2, None):
        model, optimizer = one_step(split_dim=split_dim)
        before, gradients = (
            weights(model),
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        )
        optimizer.step()
        for name, matrices in MATRICES.items():
            moved = matrices((before[name] - model.get_parameter(name).detach()) / LR)
            expected = with_norm_of_a_step(polar_factors(matrices(1.8 * gradients[name]), split_dim or 1000))
            torch.testing.assert_close(moved, expected.float(), rtol=1e-3, atol=1e-4, msg=name)
        for name in NO_MATRIX:
            twin = before[name].requires_grad_()
            twin.grad = gradients[name]
            torch.optim.AdamW([twin], lr=ADAMW_SHARE * LR, betas=(0.9, 0.95), weight_decay=0.0).step()
            torch.testing.assert_close(model.get_parameter(name), twin, rtol=0, atol=1e-6, msg=name)


class Kinds(nn.Module):
    """Layers of every memory layout that is preconditioned."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 10, 3, groups=2, bias=False)
        self.transposed = nn.ConvTranspose1d(10, 6, 2, groups=2, bias=False)
        self.wide = nn.Linear(6, 4, bias=False)
        self.tall = nn.Linear(4, 8, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
        self.rnn = nn.GRU(8, 3, batch_first=True, bias=False)
        self.other_way = pytest.importorskip("transformers.pytorch_utils").Conv1D(7, 3)

    def forward(self, x):
        h = torch.tanh(self.wide(self.transposed(torch.tanh(self.conv(x))).mT))
        h = torch.tanh(self.tall(h))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.other_way(self.rnn(h)[0]).square().mean(-1).sum(-1)


# layer -> (its parameter, that as matrices (groups, out, in), by hand)
KNOWN = {
    "conv": ("conv.weight", lambda w: w.reshape(2, 5, 6)),
    "transposed": ("transposed.weight", lambda w: torch.stack([w[:5], w[5:]]).transpose(1, 2).reshape(2, 3, 10)),
    "wide": ("wide.weight", lambda w: w[None]),
    "tall": ("tall.weight", lambda w: w[None]),
    "attention.q_proj": ("attention.in_proj_weight", lambda w: w[None, :8]),
    "attention.v_proj": ("attention.in_proj_weight", lambda w: w[None, 16:]),
    "attention.out_proj": ("attention.out_proj.weight", lambda w: w[None]),
    "rnn.weight_ih_l0": ("rnn.weight_ih_l0", lambda w: w[None]),
    "rnn.weight_hh_l0": ("rnn.weight_hh_l0", lambda w: w[None]),
    "other_way": ("other_way.weight", lambda w: w.T[None]),
}


def test_a_preconditioned_step_of_every_memory_layout():
    """``orth(u A⁻¹)``, each group for itself, whichever way round the weight lies in memory."""
    for name, split_dim in [(name, split_dim) for name in KNOWN for split_dim in (3, None)]:
        torch.manual_seed(0)
        model = Kinds().double()
        optimizer = ThorMuon(model, lr=LR, split_dim=split_dim, max_update_ratio=None)
        label, matrices = KNOWN[name]
        before = weights(model)[label]
        model(torch.randn(6, 4, 7).double()).sum().backward()
        gradient = torch.randn_like(before)  # of full rank: A is of the forward pass alone
        model.get_parameter(label).grad = gradient.clone()
        optimizer.step()
        inverse, none = optimizer.curvature[name].inverses()
        assert none is None
        inverse = torch.stack(inverse) if isinstance(inverse, list) else inverse
        lr = LR * math.sqrt(10 / (len(KNOWN) + 1))  # and k_proj: more than 10 matrices
        moved = matrices((before - model.get_parameter(label).detach()) / lr)
        ahead = matrices(1.8 * gradient)
        expected = with_norm_of_a_step(polar_factors(ahead @ inverse, split_dim or 1000))
        torch.testing.assert_close(moved, expected, rtol=1e-7, atol=1e-8, msg=name)
        plain = with_norm_of_a_step(polar_factors(ahead, split_dim or 1000))
        assert (moved - plain).abs().max() > 1e-3, f"the inverse makes no difference to {name}"


@pytest.mark.filterwarnings("ignore:ThorMuon preconditions")
def test_rows_of_a_fused_weight_that_are_left_out():
    """Each run of them is a matrix without factors, with weight decay as the others; coverage says so."""
    cases = [
        ("-q_proj", [slice(0, 8)]),
        (["-k_proj", "-v_proj"], [slice(8, 24)]),
        (["k_proj", "out_proj"], [slice(0, 8), slice(16, 24)]),
    ]
    for layers, runs in cases:
        model = nn.MultiheadAttention(8, 2, batch_first=True).double()
        options = {"split_dim": None, "weight_decay": 0.1, "max_update_ratio": None}
        optimizer = ThorMuon(model, lr=LR, layers=layers, **options)
        [entry] = [entry for entry in optimizer.coverage() if entry.name == "in_proj_weight"]
        assert entry.note.count("orthogonalised momentum for") == 3 - entry.groups
        before = model.in_proj_weight.detach().clone()
        x = torch.randn(3, 5, 8).double()
        model(x, x, x, need_weights=False)[0].square().mean().backward()
        gradient = torch.randn_like(before)  # of full rank
        model.in_proj_weight.grad = gradient.clone()
        optimizer.step()
        moved = (before * (1 - LR * 0.1) - model.in_proj_weight.detach()) / LR
        for rows in runs:
            expected = with_norm_of_a_step(polar_factors(gradient[rows]))
            torch.testing.assert_close(moved[rows], expected, rtol=1e-7, atol=1e-8)


class Bare(nn.Module):
    """Two matrices and a vector, and no layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(5, 7).double()), nn.Parameter(torch.randn(7, 3).double())
        self.offset = nn.Parameter(torch.zeros(3).double())

    def loss(self, x):
        return (torch.tanh(x @ self.first) @ self.second + self.offset).square().mean()


def test_a_model_without_a_layer():
    """It is trained, with one warning; a group may be added."""
    model, x = Bare(), batches(1)[0][0]
    with pytest.warns(UserWarning, match=r"0 of 35 .*first \(5, 7\) \(orthogonalised momentum\)") as told:
        optimizer = ThorMuon([model.first], model=model, lr=LR)
    optimizer.add_param_group({"params": [model.second, model.offset], "momentum": 0.0})
    for _ in range(2):
        model.loss(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(told) == 1
    expected = {}
    model.loss(x).backward()
    for parameter, momentum in ((model.first, 0.8), (model.second, 0.0)):
        buffer, gradient = optimizer.state[parameter]["momentum_buffer"], parameter.grad
        ahead = gradient + momentum * (gradient + momentum * buffer)
        expected[parameter] = parameter.detach() - LR * with_norm_of_a_step(polar_factors(ahead[None]))[0]
    optimizer.step()
    for parameter, wanted in expected.items():
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-7, atol=1e-8)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no layer to precondition"):
        ThorMuon(model)


@pytest.mark.filterwarnings("ignore:ThorMuon preconditions")
def test_coverage_says_which_is_which():
    model, optimizer = one_step(layers="-head")
    rest = {entry.name: entry.rest for entry in optimizer.coverage() if not entry.preconditioned}
    assert {name for name, what in rest.items() if what == "orthogonalised momentum"} == set(MATRICES)
    assert {name for name, what in rest.items() if what == "AdamW"} == {*NO_MATRIX, "head.weight"}
    assert "orthogonalised momentum: " in repr(optimizer)
    shapes = {name: [tuple(one.shape) for one in cut(model.get_parameter(name))] for name, cut in MATRICES.items()}
    shapes["bilinear.weight"], shapes["linear.weight"] = [(5, 4)] * 3, [(5, 6)]
    assert {e.name: [*e.matrices] for e in optimizer.coverage() if e.matrices} == shapes
    attention, linear = nn.MultiheadAttention(8, 2), nn.Linear(8, 6)
    split_rows(linear, (2, 4))
    optimizer = ThorMuon(nn.Sequential(attention, linear), layers="-0.v_proj")
    shapes = {"0.in_proj_weight": ((8, 8),) * 3, "0.out_proj.weight": ((8, 8),), "1.weight": ((2, 8), (4, 8))}
    assert {e.name: e.matrices for e in optimizer.coverage() if e.matrices} == shapes
    assert "A 8 x 2 groups; orthogonalised: 3 of 8 x 8; orthogonalised momentum for '0.v_proj'" in repr(optimizer)
    split_rows(linear, (2, 3))
    with pytest.raises(ValueError, match=r"split_rows of layer '1': \(2, 3\) must add up to its 6 outputs"):
        optimizer.coverage()


@pytest.mark.filterwarnings("ignore:ThorMuon preconditions")
def test_resumed_it_is_the_same():
    (model, optimizer), other = one_step(weight_decay=0.1), Odd()
    optimizer.step()
    resumed = ThorMuon(other, lr=LR, weight_decay=0.1)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        twin.grad = None if one.grad is None else one.grad.clone()
    for each in (optimizer, resumed):
        each.step()
    assert_same(weights(model), weights(other))


@pytest.mark.filterwarnings("ignore:ThorMuon, step 0:RuntimeWarning")
@pytest.mark.parametrize("split_dim", [2, None])
def test_a_known_layer_whose_statistics_never_came(split_dim):
    """Its weight is used without calling it: it takes the step of a matrix without factors."""
    model = mlp()
    optimizer = ThorMuon(model, lr=LR, split_dim=split_dim, max_update_ratio=None)
    before = weights(model)["0.weight"]
    [(x, labels)] = batches(1)
    h = torch.tanh(nn.functional.linear(x, model[0].weight, model[0].bias))
    nn.functional.cross_entropy(model[2:](h), labels).backward()
    gradient = torch.randn_like(before)
    model[0].weight.grad = gradient.clone()
    optimizer.step()
    assert [layer.refreshes for layer in optimizer.curvature.values()] == [0, 1, 1]
    expected = with_norm_of_a_step(polar_factors(gradient[None], split_dim or 1000))[0]
    torch.testing.assert_close((before - model[0].weight.detach()) / LR, expected, rtol=1e-7, atol=1e-8)


def test_eigenvalues_that_are_not_found_change_little(monkeypatch, recwarn):
    """The polar factors come from products then: a step of nearly the same direction, and of the same length."""

    def failing(_):
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    optimizer, other = (ThorMuon(one, lr=LR) for one in (model, twin))
    before = weights(model)
    train(twin, other, batches(1, dtype=torch.float32))
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    train(model, optimizer, batches(1, dtype=torch.float32))
    assert all(layer.refreshes == 1 for layer in optimizer.curvature.values())
    for name, start in before.items():
        if start.dim() < 2:
            continue
        moved, wanted = model.get_parameter(name).detach() - start, twin.get_parameter(name).detach() - start
        torch.testing.assert_close(moved.norm(), wanted.norm())
        # directions below 0.002 of the longest are left short by one and not by the other
        assert (moved - wanted).norm() < 0.25 * wanted.norm(), name
    assert not recwarn.list


def test_3x3_kernels_on_1x1_maps_are_preconditioned():
    """Eight of nine taps see nothing but padding: the factor is singular before it is damped."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))
    optimizer = ThorMuon(model)
    nn.functional.cross_entropy(model(torch.randn(32, 64, 1, 1)), torch.randint(10, (32,))).backward()
    optimizer.step()
    assert all(layer.refreshes == 1 for layer in optimizer.curvature.values())
