"""Damped inverses of blocks: one batch for all, and what happens to the block that cannot be inverted."""

import pytest
import torch

from torch_thor.curvature import BlockDiagonal, BlockLayout
from torch_thor.curvature.inverse import NewBlocks, invert_, relative_damping


def matrix_of(*blocks):
    """A block-diagonal matrix of one group; the last block may be smaller."""
    sizes = [len(block) for block in blocks]
    layout = BlockLayout.of(1, sum(sizes), sizes[0])
    full = torch.stack([block for block in blocks if len(block) == sizes[0]])
    tail = blocks[-1][None] if sizes[-1] != sizes[0] else None
    return BlockDiagonal(layout, full, tail)


class Inverted:
    """The inverse of a factor, and whether one of its blocks needed more damping or could not be inverted."""

    def __init__(self, factor, blocks):
        self.inverse = factor.with_parts([one.inverse for one in blocks])
        self.raised = any(one.raised for one in blocks)
        self.failed = any(one.failed for one in blocks)


def damped_inverses(factors):
    """The inverses of pairs of a factor and its damping, one for all groups or one each."""
    new = []
    for factor, damping in factors:
        of_groups = damping if isinstance(damping, list) else [damping] * factor.layout.groups
        new.append([NewBlocks(part, of_groups) for part in factor.parts()])
    invert_([one for blocks in new for one in blocks])
    return [Inverted(factor, blocks) for (factor, _), blocks in zip(factors, new, strict=True)]


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
        [dense], [inverse] = factor.dense(), result.inverse.dense()
        eye = torch.eye(len(dense), dtype=torch.float64)
        torch.testing.assert_close(inverse @ (dense + damping * eye), eye, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("worst", "raise_by"), [(-0.05, 1), (-0.5, 10), (-5.0, 100)])
def test_only_the_bad_block_gets_more_damping(worst, raise_by):
    """√(λ/T) = 0.1: −0.05 is saved by it, −0.5 by ten times, −5 by a hundred times as much."""
    good = positive(2)
    factor = matrix_of(good, diagonal(1.0, worst))
    [result] = damped_inverses([(factor, 0.1)])
    assert (result.raised, result.failed) == (raise_by > 1, False)
    [inverse] = result.inverse.dense()
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
    torch.testing.assert_close(second.inverse.dense(), alone.inverse.dense())


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
        torch.testing.assert_close(result.inverse.dense()[0].double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_inverses_are_row_major(size):
    """As a checkpoint gives them back: with other strides products are rounded in another order."""
    [result] = damped_inverses([(matrix_of(positive(size), positive(size)), 0.1)])
    assert all(part.is_contiguous() for part in result.inverse.parts())


# ------------------------------------------------------------------- damping relative to the factor


def inverted(factors, damping):
    return damped_inverses([(factor, relative(factor, damping)) for factor in factors])


def relative(factor, damping):
    dtype, size = factor.blocks.dtype, factor.layout.size
    return [relative_damping(trace, size, damping, dtype) for trace in factor.group_traces().tolist()]


def test_blocks_of_many_sizes_share_the_mean_diagonal_of_their_factor():
    """Of the WHOLE factor, not of the block."""
    factors = [
        matrix_of(positive(4), 9 * positive(4), positive(2)),
        matrix_of(positive(2)),
        matrix_of(100 * positive(4), positive(3)),
        matrix_of(positive(1), positive(1), 5 * positive(1)),
    ]
    for factor, result in zip(factors, inverted(factors, 0.3), strict=True):
        assert (result.raised, result.failed) == (False, False)
        [dense], [found] = factor.dense(), result.inverse.dense()
        eye = torch.eye(len(dense), dtype=torch.float64)
        expected = torch.linalg.inv(dense + 0.3 * dense.trace() / len(dense) * eye)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_each_group_has_its_own_mean():
    """Two groups of a convolution, 3 = 2 + 1 rows each, the second a hundred times the first."""
    layout = BlockLayout.of(2, 3, 2)
    one, rest = positive(2), positive(1)
    factor = BlockDiagonal(layout, torch.stack([one, 100 * one]), torch.stack([rest, 100 * rest]))
    [result] = inverted([factor], 0.1)
    first, second = result.inverse.dense()
    shift = 0.1 * (one.trace() + rest.trace()) / 3
    torch.testing.assert_close(first, torch.linalg.inv(factor.dense()[0] + shift * torch.eye(3).double()))
    torch.testing.assert_close(second, first / 100)


def test_a_damping_for_each_group_beside_one_for_all():
    """Blocks of one size from both travel in one batch."""
    layout = BlockLayout.of(2, 4, 2)
    many = BlockDiagonal(layout, torch.stack([positive(2) for _ in range(4)]), None)
    alone = matrix_of(positive(2), positive(2))
    first, second = damped_inverses([(many, [0.5, 3.0]), (alone, 0.1)])
    eye = torch.eye(4, dtype=torch.float64)
    for dense, found, damping in zip(many.dense(), first.inverse.dense(), (0.5, 3.0), strict=True):
        torch.testing.assert_close(found, torch.linalg.inv(dense + damping * eye))
    torch.testing.assert_close(second.inverse.dense()[0], torch.linalg.inv(alone.dense()[0] + 0.1 * eye))


@pytest.mark.parametrize(("worst", "raise_by"), [(-0.05, 1), (-0.5, 10), (-5.0, 100)])
def test_a_raise_is_relative_too(worst, raise_by):
    """Mean diagonal 100 and λ = 0.001, which is 0.1."""
    factor = matrix_of(diagonal(100.0, 100.0), diagonal(200.0 - worst, worst))
    [result] = inverted([factor], 0.001)
    assert (result.raised, result.failed) == (raise_by > 1, False)
    shift = 0.1 * raise_by
    expected = diagonal(1 / 100.1, 1 / 100.1, 1 / (200 - worst + shift), 1 / (worst + shift))
    torch.testing.assert_close(result.inverse.dense()[0], expected)


@pytest.mark.parametrize("worst", [-50.0, float("nan")])
def test_a_hopeless_group_spoils_no_other_factor(worst):
    hopeless = matrix_of(diagonal(1.0, 1.0), diagonal(52.0, worst))
    healthy = matrix_of(positive(2), positive(2))
    first, second = inverted([hopeless, healthy], 0.1)
    assert first.failed
    assert not second.failed
    [alone] = inverted([healthy], 0.1)
    torch.testing.assert_close(second.inverse.dense(), alone.inverse.dense())


def test_factor_of_zeros_is_damped_by_the_share_itself():
    """A layer whose inputs have vanished: the inverse only scales the step. Of two groups, the zeros alone."""
    layout = BlockLayout.of(2, 2, None)
    factor = BlockDiagonal(layout, torch.stack([diagonal(0.0, 0.0), diagonal(2.0, 4.0)]), None)
    assert relative(factor, 0.1) == pytest.approx([0.1, 0.3])
    [result] = inverted([factor], 0.1)
    assert not result.failed
    torch.testing.assert_close(result.inverse.dense()[0], diagonal(10.0, 10.0))


def test_float32_is_accurate_at_small_damping():
    """Rank 3 of 64 and λ = 1e-3, as the first batches of a wide layer give."""
    rows = torch.randn(3, 64, dtype=torch.float64)
    factor = matrix_of(rows.T @ rows / 3)
    [exact], [found] = (
        inverted([factor], 1e-3),
        inverted([factor.with_parts([p.float() for p in factor.parts()])], 1e-3),
    )
    assert (found.inverse.blocks.double() - exact.inverse.blocks).norm() < 1e-3 * exact.inverse.blocks.norm()


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_any_scale_of_a_float32_factor(scale):
    """Inputs that have nearly vanished have squares near the smallest number there is."""
    rows = torch.randn(5, 32)
    unit = matrix_of(rows.T @ rows / 5)
    [found], [expected] = (
        inverted([unit.with_parts([part * scale for part in unit.parts()])], 0.1),
        inverted([unit], 0.1),
    )
    assert (found.raised, found.failed) == (False, False)
    if scale > 1e-31:  # below, a factor counts as one of zeros
        torch.testing.assert_close(found.inverse.blocks * scale, expected.inverse.blocks, rtol=1e-3, atol=1e-4)
    else:
        torch.testing.assert_close(found.inverse.blocks[0], 10 * torch.eye(32))
