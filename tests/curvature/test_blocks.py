"""Rows cut into runs of equal blocks, against dense float64 algebra."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torch_thor.curvature import Blocks, BlockSizes

split_dims = st.none() | st.integers(1, 9)
grouped = st.builds(BlockSizes.of, st.integers(1, 13), split_dims, st.integers(1, 3))
sharded = st.builds(
    lambda rows, split_dim,
    edges: BlockSizes.of(rows, split_dim, edges=tuple(edge for edge in edges if edge < rows)),
    st.integers(1, 20), split_dims, st.lists(st.integers(1, 19), max_size=4),
)  # fmt: skip
cuts = grouped | sharded


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def filled(block_sizes):
    """Blocks with the second moments of random samples, and the dense matrix of each group."""
    size = block_sizes.rows // block_sizes.groups
    x = random(block_sizes.groups, size, 3)
    zeros = torch.zeros(block_sizes.rows, block_sizes.width, dtype=torch.float64)
    blocks = Blocks(block_sizes, zeros)
    blocks.add_second_moment_(x)
    inside = torch.block_diag(*[torch.ones(size, size) for size in block_sizes.sizes])
    whole = torch.block_diag(*(x @ x.mT)) * inside
    starts = range(0, block_sizes.rows, size)
    return blocks, torch.stack([whole[i : i + size, i : i + size] for i in starts])


@given(
    rows=st.integers(1, 13),
    groups=st.integers(1, 3),
    split_dim=split_dims,
    edges=st.lists(st.integers(0, 39), max_size=4),
)
def test_blocks_end_at_split_dim_groups_and_edges(rows, groups, split_dim, edges):
    edges = tuple(edge for edge in edges if edge < groups * rows)
    sizes, length = [], 0
    # a block ends where it is full, and where a group or a shard does
    for row in range(groups * rows):
        length += 1
        diagonal = split_dim == 1
        if length == split_dim or (row + 1) % rows == 0 or (row + 1 in edges and not diagonal):
            sizes.append(length)
            length = 0
    block_sizes = BlockSizes.of(rows, split_dim, groups, edges)
    assert block_sizes.sizes == sizes
    assert (block_sizes.rows, block_sizes.width) == (groups * rows, max(sizes))
    assert block_sizes.is_diagonal == (max(sizes) == 1)
    runs = block_sizes.runs
    assert (runs[0].first, runs[-1].last) == (0, block_sizes.rows)
    assert all(a.last == b.first and a.size != b.size for a, b in pairwise(runs))


@given(block_sizes=cuts)
def test_moments_traces_and_dense_matrices(block_sizes):
    blocks, dense = filled(block_sizes)
    torch.testing.assert_close(torch.stack(blocks.dense()), dense)
    torch.testing.assert_close(blocks.traces(), dense.diagonal(dim1=1, dim2=2).sum(-1))
    assert blocks.rows.shape == (block_sizes.rows, block_sizes.width)
    widths = torch.cat([torch.full((size,), size) for size in block_sizes.sizes])
    # nothing beyond the columns of a block
    assert not blocks.rows[torch.arange(block_sizes.width) >= widths[:, None]].any()


@given(block_sizes=cuts, columns=st.integers(1, 5), wider=st.integers(0, 2))
def test_products(block_sizes, columns, wider):
    """Rows are wider than the blocks of a process if another process has larger blocks."""
    blocks, dense = filled(block_sizes)
    matrix = random(block_sizes.groups, dense.shape[1], columns)
    wide = Blocks(block_sizes, nn.functional.pad(blocks.rows, (0, wider)))
    torch.testing.assert_close(wide.left_multiply(matrix), dense @ matrix)
    into = torch.full_like(matrix.mT, torch.nan)  # is overwritten
    blocks.write_right_product_(matrix.mT, -2.0, into)
    torch.testing.assert_close(into, -2 * matrix.mT @ dense)
    torch.testing.assert_close(wide.traces(), dense.diagonal(dim1=1, dim2=2).sum(-1))
    assert torch.equal(torch.stack(wide.dense()), torch.stack(blocks.dense()))
