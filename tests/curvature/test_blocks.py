"""Rows cut into runs of equal blocks, against dense float64 algebra: groups, tails, edges of
shards, diagonals.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torch_thor.curvature import Blocks, Cut
from torch_thor.curvature.blocks import cut_again

CPU = torch.device("cpu")
split_dims = st.none() | st.integers(1, 9)
grouped = st.builds(Cut.of, st.integers(1, 13), split_dims, st.integers(1, 3))
sharded = st.builds(
    lambda rows, split_dim,
    edges: Cut.of(rows, split_dim, edges=tuple(edge for edge in edges if edge < rows)),
    st.integers(1, 20), split_dims, st.lists(st.integers(1, 19), max_size=4),
)  # fmt: skip
cuts = grouped | sharded


def random(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def filled(cut, samples=3):
    """Blocks with the second moments of random samples, and these moments as full matrices of each
    group.
    """
    x = random(cut.groups, cut.rows // cut.groups, samples)
    blocks = Blocks(cut, torch.zeros(cut.rows, cut.width, dtype=torch.float64))
    blocks.add_second_moment_(x)
    return blocks, x @ x.mT


def same_block(cut):
    """Whether row and column belong to the same block, of the rows of all groups."""
    block = torch.tensor(
        [i for i, (count, size) in enumerate(cut.blocks) for _ in range(count * size)]
    )
    first = torch.cat([torch.arange(count).repeat_interleave(size) for count, size in cut.blocks])
    return (block[:, None] == block) & (first[:, None] == first)


def dense_of(cut, whole):
    """The matrices of each group, zero outside of the blocks."""
    whole = torch.where(same_block(cut), torch.block_diag(*whole), 0.0)
    size = cut.rows // cut.groups
    return torch.stack([whole[i : i + size, i : i + size] for i in range(0, cut.rows, size)])


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
    cut = Cut.of(rows, split_dim, groups, edges)
    assert [size for count, size in cut.blocks for _ in range(count)] == sizes
    assert (cut.rows, cut.width, cut.is_diagonal) == (groups * rows, max(sizes), max(sizes) == 1)
    assert [run.last for run in cut.runs] == [*[run.first for run in cut.runs][1:], cut.rows]
    assert all(a.size != b.size for a, b in zip(cut.runs, cut.runs[1:], strict=False))


@given(cut=cuts)
def test_moments_traces_and_dense_matrices(cut):
    blocks, whole = filled(cut)
    dense = dense_of(cut, whole)
    torch.testing.assert_close(torch.stack(blocks.dense()), dense)
    torch.testing.assert_close(blocks.traces(), dense.diagonal(dim1=1, dim2=2).sum(-1))
    assert blocks.rows.shape == (cut.rows, cut.width)
    widths = torch.cat([torch.full((count * size,), size) for count, size in cut.blocks])
    # nothing beyond the columns of a block
    assert not blocks.rows[torch.arange(cut.width) >= widths[:, None]].any()
    assert [part.data_ptr() for part in blocks.parts] == [
        blocks.rows[run.first].data_ptr() for run in cut.runs
    ]


@given(
    cut=cuts,
    columns=st.integers(1, 5),
    wider=st.integers(0, 2),
)
def test_products(cut, columns, wider):
    """Rows are wider than the blocks of a process where those of another are larger."""
    blocks, whole = filled(cut)
    dense, size = dense_of(cut, whole), cut.rows // cut.groups
    matrix = random(cut.groups, size, columns)
    wide = Blocks(cut, nn.functional.pad(blocks.rows, (0, wider)))
    torch.testing.assert_close(wide.left_multiply(matrix), dense @ matrix)
    into = torch.full((cut.groups, columns, size), torch.nan, dtype=matrix.dtype)  # is overwritten
    blocks.write_right_product_(matrix.mT, -2.0, into)
    torch.testing.assert_close(into, -2 * matrix.mT @ dense)
    torch.testing.assert_close(wide.traces(), dense.diagonal(dim1=1, dim2=2).sum(-1))
    assert torch.equal(torch.stack(wide.dense()), torch.stack(blocks.dense()))


@given(cut=cuts, processes=st.integers(1, 4), data=st.data())
def test_what_a_process_holds(cut, processes, data):
    """Of every run some blocks: together all of them."""
    bounds = []
    for count, _ in cut.blocks:
        inner = data.draw(
            st.lists(st.integers(0, count), min_size=processes - 1, max_size=processes - 1)
        )
        bounds.append((0, *sorted(inner), count))
    for process in range(processes):
        held = [
            (of[process + 1] - of[process], size)
            for of, (_, size) in zip(bounds, cut.blocks, strict=True)
        ]
        assert cut.local(bounds, process).blocks == tuple(
            (count, size) for count, size in held if count
        )


@given(rows=st.integers(1, 13), groups=st.integers(1, 2), before=split_dims, after=split_dims)
def test_cut_again(rows, groups, before, after):
    """What lies in old blocks stays, the rest is zero; a wider tensor, as rows of one weight share
    it, stays wide.
    """
    old, new = (Cut.of(rows, split_dim, groups) for split_dim in (before, after))
    blocks, whole = filled(old)
    wide = torch.cat(
        [blocks.rows, torch.zeros(old.rows, max(new.width - old.width, 0), dtype=torch.float64)], 1
    )
    found = Blocks(new, cut_again(wide, old, new))
    expected = torch.where(same_block(old) & same_block(new), torch.block_diag(*whole), 0.0)
    torch.testing.assert_close(torch.block_diag(*found.dense()), expected)
    assert found.rows.shape == wide.shape
