"""The scale-free step of what is a matrix and has no factors, and of a factor whose eigenvalues are not found."""

import copy
import math

import pytest
import torch
from torch import nn

from tiny import assert_same_bits, batches, mlp, train, weights
from torch_thor import THOR
from torch_thor.optim.spectral import ADAMW_SHARE, orthogonalise

LR = 0.1


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


def one_step(**options):
    """A model, its optimizer before the step, gradients of all parameters."""
    model = Odd()
    optimizer = THOR(model, lr=LR, scaling="spectral", **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model.linear.weight.grad = model.head.weight.grad = None  # no forward pass, so no statistics
    return model, optimizer


@pytest.mark.filterwarnings("ignore:THOR preconditions")
@pytest.mark.parametrize("name", MATRICES)
def test_an_orthogonal_step_of_the_momentum(name):
    """In the first step u = ∇ + μ ∇; its matrices are orthogonalised and given the norm of their shape."""
    model, optimizer = one_step()
    before = weights(model)[name]
    gradient = model.get_parameter(name).grad.clone()
    optimizer.step()
    moved = MATRICES[name]((before - model.get_parameter(name).detach()) / LR)
    expected = orthogonalise(MATRICES[name](1.8 * gradient))
    rows, columns = expected.shape[-2:]
    norm = math.sqrt(min(rows, columns) * max(1.0, rows / columns))
    expected = expected * (norm / torch.linalg.matrix_norm(expected, keepdim=True))
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:THOR preconditions")
@pytest.mark.parametrize("name", NO_MATRIX)
def test_what_is_no_matrix_takes_a_step_of_adamw(name):
    model, optimizer = one_step()
    parameter = model.get_parameter(name)
    twin = parameter.detach().clone().requires_grad_()
    twin.grad = parameter.grad.clone()
    torch.optim.AdamW([twin], lr=ADAMW_SHARE * LR, betas=(0.9, 0.95), weight_decay=0.0).step()
    optimizer.step()
    torch.testing.assert_close(parameter, twin, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:THOR preconditions")
def test_coverage_says_which_is_which():
    _, optimizer = one_step(skip="head")
    rest = {entry.name: entry.rest for entry in optimizer.coverage() if not entry.preconditioned}
    assert {name for name, what in rest.items() if what == "orthogonalised momentum"} == set(MATRICES)
    assert {name for name, what in rest.items() if what == "AdamW"} == {*NO_MATRIX, "head.weight"}
    assert "orthogonalised momentum: " in repr(optimizer)


@pytest.mark.filterwarnings("ignore:THOR preconditions")
def test_resumed_it_is_the_same():
    (model, optimizer), other = one_step(weight_decay=0.1), Odd()
    optimizer.step()
    resumed = THOR(other, lr=LR, scaling="spectral", weight_decay=0.1)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        twin.grad = None if one.grad is None else one.grad.clone()
    for each in (optimizer, resumed):
        each.step()
    assert_same_bits(weights(model), weights(other))


def failing_eigh(dtypes):
    """torch.linalg.eigh that does not converge in some precisions."""
    really = torch.linalg.eigh

    def eigh(blocks):
        if blocks.dtype in dtypes:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return really(blocks)

    return eigh


def test_eigenvalues_that_are_not_found_in_float32_are_found_in_float64(monkeypatch, recwarn):
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    train(twin, THOR(twin, scaling="spectral"), batches(3, dtype=torch.float32))
    monkeypatch.setattr(torch.linalg, "eigh", failing_eigh({torch.float32}))
    optimizer = THOR(model, scaling="spectral")
    train(model, optimizer, batches(3, dtype=torch.float32))
    assert all(layer.refreshes == 1 for layer in optimizer.curvature.values())
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert not recwarn.list


def test_eigenvalues_that_are_never_found_leave_the_last_good_roots_and_are_told(monkeypatch):
    model = mlp(dtype=torch.float32)
    optimizer = THOR(model, scaling="spectral", update_interval=1)
    train(model, optimizer, batches(1, dtype=torch.float32))
    before = {name: [m.clone() for m in layer.inverses()] for name, layer in optimizer.curvature.items()}
    monkeypatch.setattr(torch.linalg, "eigh", failing_eigh({torch.float32, torch.float64}))
    with pytest.warns(RuntimeWarning, match=r"'2'.*did not converge, in double precision neither; the last good"):
        train(model, optimizer, batches(1, dtype=torch.float32))
    for name, layer in optimizer.curvature.items():
        assert all(torch.equal(a, b) for a, b in zip(layer.inverses(), before[name], strict=True))
    assert all(p.isfinite().all() for p in model.parameters())


def test_3x3_kernels_on_1x1_maps_are_preconditioned():
    """Eight of nine taps see nothing but padding: the factor is singular before it is damped."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))
    optimizer = THOR(model, scaling="spectral")
    nn.functional.cross_entropy(model(torch.randn(32, 64, 1, 1)), torch.randint(10, (32,))).backward()
    optimizer.step()
    assert all(layer.refreshes == 1 for layer in optimizer.curvature.values())
