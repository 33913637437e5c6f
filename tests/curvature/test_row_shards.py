"""Which weights can be divided by rows, and how their factors are then divided."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torch_thor.curvature.kinds import kind_of
from torch_thor.curvature.shards import (
    ShardedBlocks,
    ShardedLayout,
    bounds_within,
    local,
    side_of_rows,
    why_not_by_rows,
)

BY_ROWS = [
    nn.Linear(5, 3),
    nn.Conv1d(3, 4, 2),
    nn.Conv2d(3, 4, (2, 3)),
    nn.Conv3d(2, 2, 2),
    nn.Embedding(7, 3),
    nn.ConvTranspose1d(1, 1, 3),  # one row
]
NOT = [
    nn.Conv2d(4, 4, 2, groups=2),
    nn.Conv2d(4, 4, 2, groups=4),
    nn.ConvTranspose2d(4, 4, 2),  # as many inputs as outputs: one row of it could be either
    nn.ConvTranspose2d(4, 3, 2),
    nn.ConvTranspose1d(3, 1, 2),
    nn.ConvTranspose2d(4, 4, 2, groups=4),
]


@pytest.mark.parametrize("module", BY_ROWS + NOT, ids=str)
def test_a_slice_of_a_weight_is_a_row_of_its_matrix(module):
    """The rule is compared with what it says: rows of the weight against rows of the matrix of the whole weight."""
    kind, weight = kind_of(module), torch.arange(module.weight.numel()).view(module.weight.shape)
    rows = kind.to_matrix(weight)
    is_by_rows = rows.shape == (1, len(weight), weight[0].numel()) and torch.equal(rows[0], weight.flatten(1))
    assert is_by_rows is (module in BY_ROWS)
    assert (why_not_by_rows(kind, tuple(weight.shape)) is None) is is_by_rows
    assert side_of_rows(kind) == ("A" if isinstance(module, nn.Embedding) else "G")


def test_rows_of_a_part():
    assert bounds_within((0, 4, 8, 12), None) == (0, 4, 8, 12)
    assert bounds_within((0, 4, 8, 12), slice(3, 9)) == (0, 1, 5, 6)
    assert bounds_within((0, 4, 8, 12), slice(8, 12)) == (0, 0, 0, 4)


def test_a_tensor_that_is_not_divided_is_its_own_part():
    tensor = nn.Parameter(torch.ones(2))
    assert local(tensor) is tensor


sizes = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)
split_dims = st.one_of(st.none(), st.integers(1, 9))


def layout_of(rows_of, split_dim, process):
    bounds = [0]
    for rows in rows_of:
        bounds.append(bounds[-1] + rows)
    return ShardedLayout(tuple(bounds), split_dim, rows_of[process], process)


def dense(rows_of, split_dim, matrix):
    """Zero outside of the blocks of each process."""
    mask, first = torch.zeros_like(matrix, dtype=torch.bool), 0
    for rows in rows_of:
        for block in torch.arange(first, first + rows).split(split_dim or max(rows, 1)):
            mask[block[:, None], block] = True
        first += rows
    return torch.where(mask, matrix, 0.0)


@given(rows_of=sizes, split_dim=split_dims, data=st.data())
def test_second_moments_are_those_of_the_blocks(rows_of, split_dim, data):
    """All processes sum all blocks; each then gets those of its own rows."""
    generator = torch.Generator().manual_seed(sum(rows_of))
    samples = torch.randn(1, sum(rows_of), 3, generator=generator, dtype=torch.float64)
    whole = dense(rows_of, split_dim, samples[0] @ samples[0].mT)
    process = data.draw(st.integers(0, len(rows_of) - 1))
    layout = layout_of(rows_of, split_dim, process)
    blocks = ShardedBlocks.zeros(layout, dtype=torch.float64, device=torch.device("cpu"))
    blocks.add_second_moment_(samples)
    torch.testing.assert_close(blocks.group_traces(), whole.trace()[None])
    held = [part[b[process] : b[process + 1]] for part, b in zip(blocks.parts(), blocks.bounds(), strict=True)]
    own = blocks.of_owner(held)
    first = layout.bounds[process]
    expected = whole[first : first + rows_of[process], first : first + rows_of[process]]
    if rows_of[process]:
        torch.testing.assert_close(own.dense()[0], expected)
    else:
        assert own.layout.size == 0
    spread = blocks.spread(own.parts())
    assert [None if part is None else part.shape for part in spread] == [p.shape if len(p) else None for p in held]


@given(rows_of=sizes, split_dim=split_dims)
def test_every_block_has_one_owner(rows_of, split_dim):
    layout = layout_of(rows_of, split_dim, 0)
    assert layout.size == sum(rows_of)
    for (count, *_), bounds in layout.parts:
        assert (bounds[0], bounds[-1]) == (0, count)
        assert sorted(bounds) == list(bounds)
    assert layout.owners == [p for p, rows in enumerate(rows_of) if rows or p == 0]


def test_blocks_of_shards_are_not_cut_again():
    blocks = ShardedBlocks.zeros(layout_of([2, 2], None, 0), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="split_dim=1: the blocks of sharded parameters cannot be cut again"):
        blocks.cut(1)
