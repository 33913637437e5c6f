"""Damped inverses of blocks: one batch for all, and what happens to the block that cannot be inverted."""

import pytest
import torch

from torch_thor.curvature.blocks import BlockDiagonal, BlockLayout
from torch_thor.curvature.inverse import damped_inverses


def matrix_of(*blocks):
    """A block-diagonal matrix of one group; the last block may be smaller."""
    sizes = [len(block) for block in blocks]
    layout = BlockLayout.of(1, sum(sizes), sizes[0])
    full = torch.stack([block for block in blocks if len(block) == sizes[0]])
    tail = blocks[-1][None] if sizes[-1] != sizes[0] else None
    return BlockDiagonal(layout, full, tail)


def positive(size):
    rows = torch.randn(3 * size, size, dtype=torch.float64)
    return rows.T @ rows / len(rows)


def diagonal(*numbers):
    return torch.diag(torch.tensor(numbers, dtype=torch.float64))


def test_blocks_of_many_sizes_and_dampings():
    """They travel in batches by size; each must come back to its own place with its own damping."""
    factors = [
        (matrix_of(positive(4), positive(4), positive(2)), 0.1),
        (matrix_of(positive(2)), 0.2),
        (matrix_of(positive(4), positive(3)), 0.3),
        (matrix_of(positive(2), positive(2), positive(1)), 0.4),
    ]
    for (factor, damping), result in zip(factors, damped_inverses(factors), strict=True):
        assert (result.raised, result.failed) == (False, False)
        [dense], [inverse] = factor.dense(), result.matrix.dense()
        eye = torch.eye(len(dense), dtype=torch.float64)
        torch.testing.assert_close(inverse @ (dense + damping * eye), eye, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("worst", "raise_by"), [(-0.05, 1), (-0.5, 10), (-5.0, 100)])
def test_only_the_bad_block_gets_more_damping(worst, raise_by):
    """√(λ/T) = 0.1: −0.05 is saved by it, −0.5 by ten times, −5 by a hundred times as much."""
    good = positive(2)
    factor = matrix_of(good, diagonal(1.0, worst))
    [result] = damped_inverses([(factor, 0.1)])
    assert (result.raised, result.failed) == (raise_by > 1, False)
    [inverse] = result.matrix.dense()
    torch.testing.assert_close(inverse[:2, :2], torch.linalg.inv(good + diagonal(0.1, 0.1)))
    shift = 0.1 * raise_by
    torch.testing.assert_close(inverse[2:, 2:], diagonal(1 / (1 + shift), 1 / (worst + shift)))


def test_hopeless_block_is_said_to_have_failed_and_spoils_no_other():
    """−50 is beyond a hundred times 0.1."""
    hopeless, healthy = matrix_of(positive(2), diagonal(1.0, -50.0)), matrix_of(positive(2), positive(2))
    first, second = damped_inverses([(hopeless, 0.1), (healthy, 0.1)])
    assert first.failed
    assert (second.raised, second.failed) == (False, False)
    [alone] = damped_inverses([(healthy, 0.1)])
    torch.testing.assert_close(second.matrix.dense(), alone.matrix.dense())


def test_factors_are_not_changed():
    factor = matrix_of(positive(2), diagonal(1.0, -0.5))
    before = [part.clone() for part in factor.parts()]
    damped_inverses([(factor, 0.1)])
    for part, old in zip(factor.parts(), before, strict=True):
        assert torch.equal(part, old)


def test_nothing_to_invert():
    assert damped_inverses([]) == []


def give_up_early(dtype):
    """A singular block beside which the damping is lost: what its factorisation leaves has a zero on the diagonal."""
    return 2.0**100 * torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("healthy", [0, 1, 3])
def test_a_factorisation_that_stops_half_way_is_a_failed_block_and_no_exception(dtype, healthy):
    """torch.cholesky_inverse raises for a whole batch where one block's factor has a zero on its diagonal."""
    sound = [positive(3).to(dtype) for _ in range(healthy)]
    factors = [(matrix_of(give_up_early(dtype)), 1e-3), *((matrix_of(block), 1e-3) for block in sound)]
    failed, *others = damped_inverses(factors)
    assert failed.failed
    for block, result in zip(sound, others, strict=True):
        assert (result.raised, result.failed) == (False, False)
        wanted = torch.linalg.inv(block.double() + 1e-3 * torch.eye(3, dtype=torch.float64))
        torch.testing.assert_close(result.matrix.dense()[0].double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_inverses_are_row_major(size):
    """As a checkpoint gives them back: with other strides products are rounded in another order."""
    [result] = damped_inverses([(matrix_of(positive(size), positive(size)), 0.1)])
    assert all(part.is_contiguous() for part in result.matrix.parts())
