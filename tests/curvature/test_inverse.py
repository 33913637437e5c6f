"""Damped inverses of blocks: one batch for all, and the block that cannot be inverted."""

from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from torch_thor.curvature import Blocks, BlockSizes
from torch_thor.curvature.inverse import (
    NOT_POSITIVE,
    NewFactor,
    inverse_of,
    invert_,
    relative_damping,
)

# a factor that every process holds
WHOLE = SimpleNamespace(layout=SimpleNamespace(owners=None))


def matrix_of(*groups, dtype=torch.float64):
    """A block-diagonal matrix; each group is a list of blocks, whose sizes may differ."""
    blocks = [block for group in groups for block in group]
    runs = tuple((len(list(same)), size) for size, same in groupby(map(len, blocks)))
    block_sizes = BlockSizes(runs, len(groups))
    made = Blocks(block_sizes, torch.zeros(block_sizes.rows, block_sizes.width, dtype=dtype))
    for into, block in zip([block for part in made.parts for block in part], blocks, strict=True):
        into.copy_(block)
    return made


def inverted(new):
    """The dense inverse of a factor; whether a block needed more damping, or had no inverse."""
    found = Blocks(new.sums.block_sizes, torch.zeros_like(new.sums.rows))
    for into, inverse in zip(found.parts, new.inverses, strict=True):
        into.copy_(inverse)
    flags = new.level > 0, new.level == NOT_POSITIVE
    return SimpleNamespace(dense=torch.stack(found.dense()), flags=flags)


def damped_inverses(factors):
    """The inverses of pairs of a factor and its damping, one for all groups or a list of them."""
    new = []
    for factor, damping in factors:
        each = damping if isinstance(damping, list) else [damping] * factor.block_sizes.groups
        new.append(NewFactor(WHOLE, Blocks(factor.block_sizes, factor.rows.clone()), each))
    invert_(new)
    return [inverted(factor) for factor in new]


def relative(factor, damping):
    size, dtype = factor.block_sizes.rows // factor.block_sizes.groups, factor.rows.dtype
    return [relative_damping(trace, size, damping, dtype) for trace in factor.traces().tolist()]


def positive(size, scale=1.0):
    rows = torch.randn(3 * size, size, dtype=torch.float64)
    return scale * rows.T @ rows / len(rows)


def diagonal(*numbers):
    return torch.diag(torch.tensor(numbers, dtype=torch.float64))


def test_blocks_of_many_sizes_groups_and_dampings():
    """They travel in batches by size; each must come back to its own place with its own damping."""
    factors = [
        (matrix_of([positive(4), positive(4, 9), positive(2)]), 0.1),
        (matrix_of([positive(2)]), 0.2),
        (matrix_of([positive(4), positive(3)], [positive(4), positive(3, 100)]), [0.3, 3.0]),
        # as shards cut them
        (matrix_of([positive(2), positive(3), positive(2), positive(1)]), 0.4),
        (matrix_of([positive(1), positive(1), positive(1, 5)]), 0.5),
    ]
    before = [factor.rows.clone() for factor, _ in factors]
    for is_relative in (False, True):
        given = [(f, relative(f, 0.3) if is_relative else damping) for f, damping in factors]
        for (factor, damping), result in zip(given, damped_inverses(given), strict=True):
            assert result.flags == (False, False)
            dense = torch.stack(factor.dense())
            shift = torch.tensor(damping, dtype=torch.float64).expand(len(dense))
            if is_relative:  # to the mean diagonal of the WHOLE matrix of a group
                shift = 0.3 * dense.diagonal(dim1=1, dim2=2).mean(1)
            identity = torch.eye(dense.shape[1], dtype=torch.float64)
            expected = torch.linalg.inv(dense + shift[:, None, None] * identity)
            torch.testing.assert_close(result.dense, expected, rtol=1e-10, atol=1e-12)
            if not isinstance(damping, list):
                assert torch.equal(torch.stack(inverse_of(factor, damping).dense()), result.dense)
    assert all(torch.equal(f.rows, old) for (f, _), old in zip(factors, before, strict=True))


@pytest.mark.parametrize(
    ("worst", "raise_by"), [(-0.05, 1), (-0.5, 10), (-5.0, 100), (-50.0, None), (torch.nan, None)]
)
def test_only_the_bad_block_gets_more_damping(worst, raise_by):
    """√(λ/T) = 0.1 saves −0.05; ten and a hundred times as much saves the next two."""
    good, healthy = positive(2), matrix_of([positive(2), positive(2)])
    bad = matrix_of([good, diagonal(1.0, worst)])
    # relative to a mean diagonal of 100 with λ = 0.001, which is 0.1 too
    second = matrix_of([diagonal(100.0, 100.0), diagonal(200.0 - worst, worst)])
    factors = [(bad, 0.1), (second, relative(second, 0.001)), (healthy, 0.1)]
    *results, other = damped_inverses(factors)
    assert other.flags == (False, False)
    torch.testing.assert_close(other.dense, damped_inverses([(healthy, 0.1)])[0].dense)
    if raise_by is None:
        assert results[0].flags[1]
        assert inverse_of(bad, 0.1) is None
        return
    shift = 0.1 * raise_by
    for result, first, largest in zip(
        results, (good, diagonal(100, 100)), (1, 200 - worst), strict=True
    ):
        assert result.flags == (raise_by > 1, False)
        rest = torch.linalg.inv(first + diagonal(0.1, 0.1))
        raised = diagonal(1 / (largest + shift), 1 / (worst + shift))
        torch.testing.assert_close(result.dense, torch.block_diag(rest, raised)[None])


def test_groups_that_are_averaged_that_keep_their_factor_or_never_had_a_row():
    new, old = (matrix_of(*([positive(2), positive(1)] for _ in range(4))) for _ in range(2))
    keeps, plain = [False, True, False, False], [False, False, True, False]
    sums = Blocks(new.block_sizes, new.rows.clone())
    factor = NewFactor(WHOLE, sums, [0.1] * 4, old, 0.25, keeps, plain)
    invert_([factor])
    now, before = torch.stack(new.dense()), torch.stack(old.dense())
    expected = now + 0.25 * (before - now)
    expected[1] = before[1]
    torch.testing.assert_close(torch.stack(factor.sums.dense()), expected)
    identity = torch.eye(3, dtype=torch.float64)
    inverses = torch.linalg.inv(expected + 0.1 * identity)
    inverses[2] = identity  # for the plain gradient
    torch.testing.assert_close(inverted(factor).dense, inverses)


def test_float32_with_few_rows():
    """Rank 3 of 64 and λ = 1e-3, as of first batches."""
    rows = torch.randn(3, 64, dtype=torch.float64)
    unit = rows.T @ rows / 3
    factors = [matrix_of([unit], dtype=dtype) for dtype in (torch.float64, torch.float32)]
    exact, found = damped_inverses([(factor, relative(factor, 1e-3)) for factor in factors])
    assert (found.dense.double() - exact.dense).norm() < 1e-3 * exact.dense.norm()
