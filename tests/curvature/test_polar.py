"""Polar factors against singular value decompositions in float64: every cut, every scale, and what is lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def lengths(matrices):
    return torch.linalg.svdvals(matrices.double())


def with_lengths(count, rows, columns, least, most=1.0):
    """Matrices whose singular values are evenly spread, by their logarithms, from one number to another."""
    left = torch.linalg.qr(torch.randn(count, rows, rows).double())[0]
    right = torch.linalg.qr(torch.randn(count, columns, columns).double())[0][:, :rows]
    return (left * torch.logspace(0, 1, rows, base=least / most).double() * most) @ right


def never(_):
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


@pytest.mark.parametrize(("size", "columns"), [(1, 1), (1, 6), (5, 6), (7, 7), (8, 30)])
def test_every_cut_of_every_shape(size, columns):
    """Whether the rows divide or not; a cut larger than the matrix is none; zeros stay zeros."""
    for dtype, tolerance in DTYPES.items():
        for rows in (None, 1, 2, 3, 4, 5, 7, 8, 100):
            matrices = torch.randn(3, size, columns, dtype=dtype)
            before = matrices.clone()
            [found] = orthogonalise([matrices], rows)
            assert (found.shape, found.dtype) == (matrices.shape, dtype)
            torch.testing.assert_close(found.double(), by_svd(matrices, rows), rtol=tolerance, atol=tolerance)
            assert torch.equal(matrices, before)
            if rows == 1:
                torch.testing.assert_close(found, matrices / matrices.norm(dim=-1, keepdim=True))
            zeros = torch.zeros_like(matrices)
            assert torch.equal(orthogonalise([zeros], rows)[0], zeros)
    assert orthogonalise([], 3) == []


@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(0, 5)), min_size=1, max_size=5),
    rows=st.none() | st.integers(1, 8),
)
def test_batches_of_many_shapes_come_back_to_their_places(shapes, rows):
    """Blocks with as many rows share an eigendecomposition, whatever their columns: whole ones, and tails."""
    generator = torch.Generator().manual_seed(len(shapes))
    batches = [
        torch.randn(count, size, size + more + 8, generator=generator, dtype=torch.float64) * 10.0**i
        for i, (count, size, more) in enumerate(shapes)
    ]
    for matrices, found in zip(batches, orthogonalise(batches, rows), strict=True):
        torch.testing.assert_close(found, by_svd(matrices, rows), rtol=1e-9, atol=1e-10)


def test_one_eigendecomposition_for_all_blocks_of_a_size(monkeypatch):
    """Of 4 rows: two of each matrix of 8, and one of each of 4; of 3: what is left of 7, and the matrix of 3."""
    really, seen = torch.linalg.eigh, []

    def eigh(grams):
        seen.append(tuple(grams.shape))
        return really(grams)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    shapes = [(2, 8, 20), (3, 4, 5), (1, 7, 9), (1, 3, 30)]
    orthogonalise([torch.randn(shape).double() for shape in shapes], 4)
    assert sorted(seen) == [(2, 3, 3), (2 * 2 + 3 + 1, 4, 4)]


# ---- scales ----------------------------------------------------------------------------------------------------------


def test_zeros_beside_others():
    """Theirs come near enough to what they are alone, and whole matrices exactly, also beside one that has vanished."""
    for rows in (None, 1, 3):
        matrices, other = with_lengths(3, 6, 9, 0.1), with_lengths(1, 6, 20, 0.1)
        matrices[1] = 0
        one, two = orthogonalise([matrices, other], rows)
        assert torch.equal(one[1], matrices[1])
        torch.testing.assert_close(one[::2], by_svd(matrices[::2], rows), rtol=0, atol=2e-2)
        torch.testing.assert_close(two, by_svd(other, rows), rtol=0, atol=2e-2)
    for dtype, error in ((torch.float32, 1e-3), (torch.float64, 1e-9)):
        for size in (0.0, 1e-30):
            matrices = with_lengths(3, 6, 9, 0.01)
            expected, matrices = by_svd(matrices), matrices.to(dtype)
            matrices[1] *= size
            (found,) = orthogonalise([matrices])
            torch.testing.assert_close(found[::2].double(), expected[::2], rtol=0, atol=error)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-12, 1e12, 1e30, 3e38])
def test_scales_whose_squares_leave_float32(scale):
    """Alone, and beside matrices of an ordinary size in the same batch of blocks."""
    for rows in (None, 1, 2):
        unit = with_lengths(2, 5, 7, 0.1).float()
        unit = unit / unit.abs().amax()  # no number beyond the largest there is
        plain = with_lengths(2, 5, 8, 0.1).float()
        for batches in ([unit * scale], [unit * scale, plain]):
            for matrices, found in zip((unit, plain), orthogonalise(batches, rows), strict=False):
                torch.testing.assert_close(found.double(), by_svd(matrices, rows), rtol=0, atol=1e-3)


def test_unlike_scales_in_one_batch():
    """Within the range of squares each is exact."""
    scales = torch.tensor([1e-9, 1.0, 1e9])[:, None, None]
    matrices = with_lengths(3, 5, 7, 0.1).float()
    [found] = orthogonalise([matrices * scales])
    torch.testing.assert_close(found.double(), by_svd(matrices), rtol=0, atol=1e-4)


def test_directions_that_are_lost_in_rounding():
    """The others have length 1, and what rounding has left of these is short."""
    for dtype in DTYPES:
        for rank in (1, 4):
            matrices = (torch.randn(3, 40, rank).double() @ torch.randn(3, rank, 64).double()).to(dtype)
            [found] = orthogonalise([matrices])
            assert found.isfinite().all()
            values = lengths(found)
            torch.testing.assert_close(values[:, :rank], torch.ones(3, rank).double(), rtol=1e-3, atol=0)
            assert values[:, rank:].max() < 1e-3
    [found] = orthogonalise([torch.ones(1, 4, 6)])
    torch.testing.assert_close(lengths(found)[0], torch.tensor([1.0, 0, 0, 0]).double(), rtol=1e-4, atol=1e-3)


def test_no_direction_comes_out_long():
    """In float32, down to far below what squares can tell; where they just can, lengths are right to a fifth."""
    for least in (1e-3, 3e-4, 1e-4, 1e-6, 1e-9):
        for rows, columns in ((5, 9), (40, 64), (64, 64)):
            values = lengths(orthogonalise([with_lengths(4, rows, columns, least).float()])[0])
            assert values.isfinite().all()
            assert values.max() < 1.2


# ---- by products -----------------------------------------------------------------------------------------------------


def test_without_eigenvalues_it_goes_by_products(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", never)
    for dtype in DTYPES:
        for rows in (None, 4):
            matrices = [with_lengths(3, 10, 14, 0.02).to(dtype), with_lengths(1, 4, 14, 0.05).to(dtype)]
            for one, found in zip(matrices, orthogonalise(matrices, rows), strict=True):
                assert found.dtype == dtype
                assert torch.linalg.matrix_norm(found.double() - by_svd(one, rows), ord=2).max() < 2e-2


def test_one_shape_without_eigenvalues_leaves_the_others_exact(monkeypatch):
    """One block that does not converge fails its batch; then they are taken one by one, and it alone by products."""
    really = torch.linalg.eigh
    poor, rich = with_lengths(1, 4, 6, 0.1), with_lengths(2, 4, 8, 0.1)
    calls = []

    def eigh(grams):
        calls.append(len(grams))
        if len(calls) <= 2:  # all three, then the first of them
            never(grams)
        return really(grams)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    one, two = orthogonalise([poor, rich])
    torch.testing.assert_close(two, by_svd(rich), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(one, by_svd(poor), rtol=0, atol=2e-2)
    assert calls == [3, 1, 1, 1]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 0.02), (torch.float64, 0.02), (torch.bfloat16, 0.12)])
def test_products_alone(dtype, error):
    """Six rounds: singular values from 0.01 to 1 come out as 1 to within two hundredths."""
    for rows, columns in ((1, 9), (2, 5), (8, 8), (40, 64), (128, 300)):
        for least in (0.01, 0.1, 0.9):
            matrices = with_lengths(2, rows, columns, least)
            matrices = matrices / matrices.abs().amax(dim=(1, 2), keepdim=True)
            matrices = matrices if dtype == torch.float64 else matrices.float()
            found = polar._by_products(matrices, dtype)
            assert found.dtype == matrices.dtype
            values = lengths(found)
            assert values.min() > 0.98
            assert values.max() < 1.02
            assert torch.linalg.matrix_norm(found.double() - by_svd(matrices), ord=2).max() < error
    zeros, single = torch.zeros(1, 3, 5), torch.ones(1, 3, 5)
    [first, second] = polar._by_products(torch.cat([zeros, single]), dtype)
    assert torch.equal(first, zeros[0])
    torch.testing.assert_close(second, single[0] / 15**0.5, rtol=0.02, atol=0)
