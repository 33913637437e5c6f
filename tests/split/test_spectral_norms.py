"""Lanczos against dense eigenvalues, and losses against dense spectral norms."""

import pytest
import torch

from torch_thor.curvature import Blocks, BlockSizes
from torch_thor.split.spectral import largest_eigenvalues, spectral_losses


def wishart(n, rows):
    x = torch.randn(n, rows, dtype=torch.float64)
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
    matrix = wishart(30, 60)[None]
    found = largest_eigenvalues(matrix, tolerance=0.0)
    torch.testing.assert_close(found, torch.linalg.eigvalsh(matrix)[:, -1], rtol=1e-12, atol=0)


def factor(samples):
    groups, size, rows = samples.shape
    matrix = Blocks(BlockSizes.of(size, None, groups), samples.new_zeros(groups * size, size))
    matrix.add_second_moment_(samples / rows**0.5)
    return matrix


def test_losses_equal_dense_spectral_norms():
    split_dims = (1, 4, 16, 32, 37, 64)
    index = torch.arange(37)
    for groups in (1, 3):
        # unequal groups: the norm of the whole is that of the largest one
        scales = torch.arange(1, groups + 1)[:, None, None]
        matrix = factor(torch.randn(groups, 37, 50, dtype=torch.float64) * scales + 0.3)
        dense = torch.stack(matrix.dense())
        whole = torch.linalg.matrix_norm(dense, ord=2).amax()
        cut = [dense * (index[:, None] // s == index // s) for s in split_dims]
        expected = [1 - float(torch.linalg.matrix_norm(one, ord=2).amax() / whole) for one in cut]
        found = spectral_losses(matrix, split_dims)
        assert found == pytest.approx(expected, abs=2e-3)
        assert found[-2:] == (0.0, 0.0)


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
