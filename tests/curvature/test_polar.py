"""Polar factors against singular value decompositions in float64, at every cut and scale."""

from itertools import product

import pytest
import torch

from torch_thor.curvature import polar
from torch_thor.curvature.polar import orthogonalise

DTYPES = {torch.float64: 1e-10, torch.float32: 1e-3}


def by_svd(matrices, rows=None):
    """All singular values 1, block of rows by block of rows."""
    parts = []
    for block in matrices.double().split(rows or 10**6, dim=1):
        left, _, right = torch.linalg.svd(block, full_matrices=False)
        parts.append(left @ right)
    return torch.cat(parts, dim=1)


def assert_polar(found, matrices, rows=None, *, rtol=0.0, atol):
    torch.testing.assert_close(found.double(), by_svd(matrices, rows), rtol=rtol, atol=atol)


def with_lengths(count, rows, columns, least, most=1.0):
    """Matrices whose singular values are evenly spread, by their logarithms."""
    left = torch.linalg.qr(torch.randn(count, rows, rows).double())[0]
    right = torch.linalg.qr(torch.randn(count, columns, columns).double())[0][:, :rows]
    return (left * torch.logspace(0, 1, rows, base=least / most).double() * most) @ right


def test_every_cut_of_every_shape():
    """Whether the rows divide or not; a cut larger than the matrix is none; zeros stay zeros."""
    for (dtype, tolerance), rows in product(DTYPES.items(), (None, 1, 2, 3, 4, 5, 7, 8, 100)):
        shapes = [(3, 1, 1), (3, 1, 6), (3, 5, 6), (3, 7, 7), (3, 8, 30), (1, 8, 9), (2, 3, 11)]
        batches = [torch.randn(shape, dtype=dtype) * 10.0**i for i, shape in enumerate(shapes)]
        before = [matrices.clone() for matrices in batches]
        for matrices, found in zip(batches, orthogonalise(batches, rows), strict=True):
            assert (found.shape, found.dtype) == (matrices.shape, dtype)
            assert_polar(found, matrices, rows, rtol=tolerance, atol=tolerance)
            zeros = torch.zeros_like(matrices)
            assert torch.equal(orthogonalise([zeros], rows)[0], zeros)
        assert all(map(torch.equal, batches, before))


def test_zeros_beside_others():
    """Blocks come near enough to their own polar factors, and whole matrices exactly."""
    for rows in (None, 1, 3):
        matrices, other = with_lengths(3, 6, 9, 0.1), with_lengths(1, 6, 20, 0.1)
        matrices[1] = 0
        first, second = orthogonalise([matrices, other], rows)
        assert torch.equal(first[1], matrices[1])
        assert_polar(first[::2], matrices[::2], rows, atol=2e-2)
        assert_polar(second, other, rows, atol=2e-2)


def test_scales_whose_squares_leave_float32():
    """By themselves, and beside matrices of an ordinary size in the same batch of blocks."""
    for scale, rows in product((1e-38, 1e-30, 1e-12, 1e12, 1e30, 3e38), (None, 2)):
        unit = with_lengths(2, 5, 7, 0.1).float()
        unit = unit / unit.abs().amax()  # no number beyond the largest there is
        plain = with_lengths(2, 5, 8, 0.1).float()
        for batches in ([unit * scale], [unit * scale, plain]):
            for matrices, found in zip((unit, plain), orthogonalise(batches, rows), strict=False):
                assert_polar(found, matrices, rows, atol=1e-3)


def test_directions_that_are_lost_in_rounding():
    """The others have length 1, and what rounding has left of these is short."""
    for dtype, rank in product(DTYPES, (1, 4)):
        matrices = torch.randn(3, 40, rank).double() @ torch.randn(3, rank, 64).double()
        values = torch.linalg.svdvals(orthogonalise([matrices.to(dtype)])[0].double())
        assert ((values[:, :rank] - 1).abs() < 1e-3).all()
        assert values[:, rank:].max() < 1e-3
    # in float32, down to far below what squares can tell; lengths are right to a fifth
    shapes = ((5, 9), (40, 64), (64, 64))
    for least, (rows, columns) in product((1e-3, 1e-4, 1e-6, 1e-9), shapes):
        matrices = with_lengths(4, rows, columns, least).float()
        values = torch.linalg.svdvals(orthogonalise([matrices])[0])
        assert values.isfinite().all()
        assert values.max() < 1.2, (least, rows, columns)


def never(_):
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


def no_numbers(grams):
    """What LAPACK of MKL 2024 gives for some matrices with rows of zeros, without an error."""
    values = torch.linalg.eigvalsh(grams)
    vectors = torch.diag_embed(torch.ones_like(values))
    values[0, 1] = vectors[0, :, 1] = torch.nan
    return values, vectors


@pytest.mark.parametrize("fails", [never, no_numbers])
def test_a_matrix_without_eigenvalues_leaves_the_others_exact(monkeypatch, fails):
    """A batch that fails is computed matrix by matrix; a matrix that fails again, by products."""
    really, calls = torch.linalg.eigh, []
    poor, rich = with_lengths(1, 4, 6, 0.1), with_lengths(2, 4, 8, 0.1)

    def eigh(grams):
        calls.append(len(grams))
        return (fails if len(calls) <= 2 else really)(grams)  # all three, then the first of them

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    first, second = orthogonalise([poor, rich])
    assert_polar(second, rich, rtol=1e-9, atol=1e-10)
    assert_polar(first, poor, atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 0.02), (torch.float64, 0.02), (torch.bfloat16, 0.12)]
)
def test_by_products(dtype, error):
    """Six rounds: singular values from 0.01 to 1 come out as 1 to within two hundredths."""
    shapes = ((1, 9), (8, 8), (40, 64), (128, 300))
    for (rows, columns), least in product(shapes, (0.01, 0.1, 0.9)):
        matrices = with_lengths(2, rows, columns, least)
        matrices = matrices / matrices.abs().amax(dim=(1, 2), keepdim=True)
        matrices = matrices if dtype == torch.float64 else matrices.float()
        found = polar._by_products(matrices, dtype)
        assert found.dtype == matrices.dtype
        values = torch.linalg.svdvals(found.double())
        assert 0.98 < values.min() <= values.max() < 1.02
        away = torch.linalg.matrix_norm(found.double() - by_svd(matrices), ord=2)
        assert away.max() < error
    assert not polar._by_products(torch.zeros(1, 3, 5), dtype).any()
