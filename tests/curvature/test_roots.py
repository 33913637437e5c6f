"""Damped inverse roots of blocks, against numpy's eigenvalues, and what happens to the block that has none."""

import numpy as np
import pytest
import torch
from test_inverse import diagonal, matrix_of, positive

from torch_thor.curvature.blocks import BlockDiagonal, BlockLayout
from torch_thor.curvature.roots import damped_inverse_roots


def power(matrix, exponent):
    """matrix ** exponent of a symmetric positive definite matrix."""
    values, vectors = np.linalg.eigh(matrix.numpy())
    return torch.from_numpy((vectors * values**exponent) @ vectors.T)


@pytest.mark.parametrize("root", [1, 2, 4])
def test_blocks_of_many_sizes_and_dampings(root):
    """They travel in batches by size; the damping is relative to the mean diagonal of the WHOLE factor."""
    factors = [
        (matrix_of(positive(4), 9 * positive(4), positive(2)), 0.1),
        (matrix_of(positive(2)), 0.2),
        (matrix_of(100 * positive(4), positive(3)), 0.3),
        (matrix_of(positive(1), positive(1), 5 * positive(1)), 0.4),
    ]
    for (factor, damping), result in zip(factors, damped_inverse_roots(factors, root), strict=True):
        assert (result.raised, result.failed) == (False, False)
        [dense], [found] = factor.dense(), result.matrix.dense()
        shift = damping * dense.trace() / len(dense)
        expected = power(dense + shift * torch.eye(len(dense), dtype=torch.float64), -1 / root)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_each_group_has_its_own_mean():
    """Two groups of a convolution, 3 = 2 + 1 rows each, the second a hundred times the first."""
    layout = BlockLayout.of(2, 3, 2)
    one, rest = positive(2), positive(1)
    factor = BlockDiagonal(layout, torch.stack([one, 100 * one]), torch.stack([rest, 100 * rest]))
    [result] = damped_inverse_roots([(factor, 0.1)], 4)
    first, second = result.matrix.dense()
    shift = 0.1 * (one.trace() + rest.trace()) / 3
    expected = power(factor.dense()[0] + shift * torch.eye(3, dtype=torch.float64), -1 / 4)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, first * 100 ** (-1 / 4))


@pytest.mark.parametrize(("worst", "raise_by"), [(-0.05, 1), (-0.5, 10), (-5.0, 100)])
def test_only_the_bad_block_gets_more_damping(worst, raise_by):
    """Mean diagonal 1 and λ = 0.1: −0.05 is saved by it, −0.5 by ten times, −5 by a hundred times as much."""
    good = diagonal(1.0, 1.0)
    factor = matrix_of(good, diagonal(2.0 - worst, worst))
    [result] = damped_inverse_roots([(factor, 0.1)], 4)
    assert (result.raised, result.failed) == (raise_by > 1, False)
    [found] = result.matrix.dense()
    shift = 0.1 * raise_by
    expected = torch.tensor([1.1, 1.1, 2 - worst + shift, worst + shift], dtype=torch.float64) ** (-1 / 4)
    torch.testing.assert_close(found, torch.diag(expected))


@pytest.mark.parametrize("worst", [-50.0, float("nan")])
def test_hopeless_block_is_said_to_have_failed_and_spoils_no_other(worst):
    """−50 is beyond a hundred times 0.1; NaN makes the eigensolver fail for the whole batch."""
    hopeless = matrix_of(diagonal(1.0, 1.0), torch.tensor([[52.0, 0.0], [0.0, worst]], dtype=torch.float64))
    healthy = matrix_of(positive(2), positive(2))
    first, second = damped_inverse_roots([(hopeless, 0.1), (healthy, 0.1)], 4)
    assert first.failed
    assert not second.failed
    [alone] = damped_inverse_roots([(healthy, 0.1)], 4)
    torch.testing.assert_close(second.matrix.dense(), alone.matrix.dense())


def test_factor_of_zeros():
    """A layer whose gradient has vanished: the root of the damping alone, which only scales the step."""
    [result] = damped_inverse_roots([(matrix_of(diagonal(0.0, 0.0)), 0.1)], 4)
    assert not result.failed
    torch.testing.assert_close(result.matrix.dense()[0], diagonal(0.1, 0.1).diag().pow(-1 / 4).diag())


def test_float32_is_accurate_at_small_damping():
    """Rank 3 of 64 and λ = 1e-3, as the first batches of a wide layer give."""
    rows = torch.randn(3, 64, dtype=torch.float64)
    factor = matrix_of(rows.T @ rows / 3)
    [exact] = damped_inverse_roots([(factor, 1e-3)], 4)
    single = factor.with_parts([part.float() for part in factor.parts()])
    [found] = damped_inverse_roots([(single, 1e-3)], 4)
    assert (found.matrix.blocks.double() - exact.matrix.blocks).norm() < 1e-3 * exact.matrix.blocks.norm()


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_any_scale_of_a_float32_factor(scale):
    """The gradients of a loss that has vanished have squares near the smallest number there is."""
    rows = torch.randn(5, 32)
    unit = matrix_of(rows.T @ rows / 5)
    [found] = damped_inverse_roots([(unit.with_parts([part * scale for part in unit.parts()]), 0.1)], 4)
    [expected] = damped_inverse_roots([(unit, 0.1)], 4)
    assert (found.raised, found.failed) == (False, False)
    if scale > 1e-31:  # below, a factor counts as one of zeros
        torch.testing.assert_close(found.matrix.blocks * scale**0.25, expected.matrix.blocks, rtol=1e-3, atol=1e-4)
    else:
        torch.testing.assert_close(found.matrix.blocks[0], 0.1**-0.25 * torch.eye(32))
