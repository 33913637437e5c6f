"""Factors as matrices with as many rows as the weight, which do not depend on how many processes divide the rows.

Row i holds row i of its block, from the first column of the block on, and zeros where the block is narrower than the
matrix. So the rows of a factor can be divided like those of its weight (FSDP2), saved, and divided differently when
they are loaded. Blocks end where shards end, so with another number of processes other blocks are needed. A row keeps
the elements that are in its old and its new block.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.curvature.block_layout import BlockLayout
from torch_thor.curvature.blocks import BlockDiagonal


def shard_bounds(rows: int, shards: int) -> tuple[int, ...]:
    """Return the first row of each shard, and the number of rows, as ``torch.chunk`` and FSDP2 divide them."""
    each = -(-rows // shards)
    return tuple(min(i * each, rows) for i in range(shards + 1))


def to_rows(matrix: BlockDiagonal, width: int) -> Tensor:
    """Return a block-diagonal matrix as rows."""
    layout = matrix.layout
    if layout.block == width and matrix.tail is None:
        return matrix.blocks.reshape(layout.size, width)
    rows = matrix.blocks.new_zeros((layout.size, width))
    for old, new in zip(from_rows(rows, layout).parts(), matrix.parts(), strict=True):
        old.copy_(new)
    return rows


def from_rows(rows: Tensor, layout: BlockLayout) -> BlockDiagonal:
    """Return the block-diagonal matrix that is stored as rows."""
    s, r, covered = layout.block, layout.tail, layout.covered
    blocks = rows[:covered, :s].unflatten(0, (layout.full_blocks, s))
    return BlockDiagonal(layout, blocks, rows[None, covered:, :r] if r else None)


def block_of_each_row(bounds: Sequence[int], split_dim: int | None) -> Tensor:
    """Return where the block of each row starts and ends."""
    found = torch.empty((2, bounds[-1]), dtype=torch.long)
    for first, last in itertools.pairwise(bounds):
        rows = torch.arange(last - first)
        starts = torch.zeros_like(rows) if split_dim is None else rows // split_dim * split_dim
        ends = starts + (last - first if split_dim is None else split_dim)
        found[0, first:last] = starts + first
        found[1, first:last] = ends.clamp(max=last - first) + first
    return found


def cut_again(rows: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return rows for other blocks. What is between the old blocks is zero."""
    before, after = before.to(rows.device), after.to(rows.device)
    column = after[0, :, None] + torch.arange(rows.shape[1], device=rows.device)  # of the whole matrix
    kept = (column >= before[0, :, None]) & (column < before[1, :, None]) & (column < after[1, :, None])
    source = (column - before[0, :, None]).clamp(0, rows.shape[1] - 1)
    return torch.where(kept, rows.gather(1, source), 0.0)
