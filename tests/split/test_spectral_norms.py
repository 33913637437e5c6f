"""Lanczos against dense eigenvalues, and losses against dense spectral norms."""

import pytest
import torch

from torch_thor.curvature import BlockDiagonal, BlockLayout
from torch_thor.split.spectral import largest_eigenvalues, spectral_losses, spectral_norm


def wishart(n, rows, dtype=torch.float64):
    x = torch.randn(n, rows, dtype=dtype)
    return x @ x.T / rows


def with_spectrum(values):
    orthogonal = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return orthogonal @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ orthogonal.T


MATRICES = {
    "flat spectrum": lambda: wishart(300, 3000),
    "low rank": lambda: wishart(200, 7),
    "rank one": lambda: torch.ones(150, 150, dtype=torch.float64),
    "zero": lambda: torch.zeros(40, 40, dtype=torch.float64),
    "one clustered value": lambda: 3 * torch.eye(60, dtype=torch.float64),
    "a double top": lambda: with_spectrum([5.0, 5.0, *(0.01 * i for i in range(90))]),
    "a close second": lambda: with_spectrum([1.0, 0.9995, *(0.99 - 0.01 * i for i in range(90))]),
    "a lonely top": lambda: with_spectrum([1e6, *([1.0] * 99)]),
    "one row": lambda: torch.tensor([[2.5]], dtype=torch.float64),
    "one entry": lambda: torch.diag(torch.eye(30, dtype=torch.float64)[17]),
    "tiny": lambda: 1e-25 * wishart(50, 20),
    "huge": lambda: 1e25 * wishart(50, 20),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MATRICES)
def test_equals_the_dense_eigenvalue(name, dtype):
    matrix = MATRICES[name]()
    expected = torch.linalg.eigvalsh(matrix)[-1:]
    found = largest_eigenvalues(matrix[None].to(dtype))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0 if name != "zero" else 1e-30)


def test_a_batch_of_unlike_matrices():
    names = ["rank one", "flat", "zero", "top"]
    matrices = torch.stack(
        [
            torch.ones(64, 64, dtype=torch.float64),
            wishart(64, 640),
            torch.zeros(64, 64, dtype=torch.float64),
            with_spectrum([1e9, *([1.0] * 63)]),
        ]
    )
    found = largest_eigenvalues(matrices, tolerance=1e-9)
    for name, value, expected in zip(names, found, torch.linalg.eigvalsh(matrices)[:, -1], strict=True):
        assert value.item() == pytest.approx(expected.item(), rel=1e-8, abs=1e-12), name


def test_all_steps_give_the_exact_value():
    matrix = wishart(30, 60)[None]
    found = largest_eigenvalues(matrix, tolerance=0.0)
    torch.testing.assert_close(found, torch.linalg.eigvalsh(matrix)[:, -1], rtol=1e-12, atol=0)


def test_random_numbers_are_the_callers():
    matrix = wishart(10, 10)[None]
    before = torch.get_rng_state()
    largest_eigenvalues(matrix)
    assert torch.equal(torch.get_rng_state(), before)


def factor(samples):
    groups, size, rows = samples.shape
    matrix = BlockDiagonal.zeros(BlockLayout.of(groups, size, None), dtype=samples.dtype, device=samples.device)
    matrix.add_second_moment_(samples / rows**0.5)
    return matrix


@pytest.mark.parametrize("groups", [1, 3])
def test_losses_equal_dense_spectral_norms(groups):
    # unequal groups: the norm of the whole is that of the largest one
    samples = torch.randn(groups, 37, 50, dtype=torch.float64) * torch.arange(1, groups + 1)[:, None, None]
    matrix = factor(samples + 0.3)
    split_dims = (1, 4, 16, 32, 37, 64)
    whole = torch.linalg.matrix_norm(torch.block_diag(*matrix.dense()), ord=2)
    expected = [
        1 - torch.linalg.matrix_norm(torch.block_diag(*matrix.cut(s).dense()), ord=2) / whole for s in split_dims
    ]
    found = spectral_losses(matrix, split_dims)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected).float(), rtol=0, atol=2e-3)
    assert found[-2:] == (0.0, 0.0)
    torch.testing.assert_close(spectral_norm(matrix), whole, rtol=1e-3, atol=0)


def test_a_factor_of_ones_keeps_the_share_that_a_block_covers():
    found = spectral_losses(factor(torch.ones(1, 64, 5)), (1, 16, 32, 64))
    assert found == pytest.approx((63 / 64, 3 / 4, 1 / 2, 0.0), abs=1e-5)


def test_the_last_small_block_counts():
    samples = torch.zeros(1, 10, 4)
    samples[:, 8:] = 1.0  # all of it in rows 8 and 9: blocks of 4 end with a block of those two
    assert spectral_losses(factor(samples), (4, 3)) == pytest.approx((0.0, 0.5), abs=1e-6)


def test_a_zero_factor_loses_nothing():
    assert spectral_losses(factor(torch.zeros(1, 8, 3)), (1, 4, 8)) == (0.0, 0.0, 0.0)


def test_an_estimate_below_the_truth_is_no_gain():
    # the eigenvalues of a diagonal lie close, so that the whole is found a little too small, and each block exactly
    samples = torch.diag(torch.linspace(0.9, 1.0, 2000, dtype=torch.float64).sqrt())[None]
    matrix = factor(samples)
    assert spectral_norm(matrix) < spectral_norm(matrix.cut(1))
    assert spectral_losses(matrix, (1, 16)) == (0.0, 0.0)
