"""Block-diagonal symmetric matrices, split from index 0 into blocks of one size.

There are ``groups`` independent matrices of size ``n``, each split into ``k = n // s`` blocks of size ``s`` and, if
``s`` does not divide ``n``, one tail block of size ``r = n % s``. Tensors have these shapes:

- ``blocks``: ``(groups * k, s, s)``, group-major
- ``tail``: ``(groups, r, r)``, or None
- samples: ``(groups, n, rows)``, features first: their columns are the vectors ``a`` and ``g`` of the paper

A diagonal matrix has blocks of size 1. Only the blocks are stored; the full matrix is formed by
:meth:`BlockDiagonal.dense` alone, for users to look at.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_thor.curvature.block_layout import BlockLayout
from torch_thor.curvature.precision import add_product_, product


@dataclass
class BlockDiagonal:
    """A block-diagonal matrix for each group, stored as blocks."""

    layout: BlockLayout  # the sizes of the matrices and of their blocks
    blocks: Tensor  # `(groups * k, s, s)`
    tail: Tensor | None = None  # `(groups, r, r)`, or None if the block size divides the size

    @classmethod
    def zeros(cls, layout: BlockLayout, *, dtype: torch.dtype, device: torch.device) -> "BlockDiagonal":
        """Return zero matrices of a layout."""
        shape, tail = layout.shapes
        return cls(
            layout,
            torch.zeros(shape, dtype=dtype, device=device),
            None if tail is None else torch.zeros(tail, dtype=dtype, device=device),
        )

    def parts(self) -> list[Tensor]:
        """Return the stored tensors, each a batch of square blocks."""
        return [self.blocks] if self.tail is None else [self.blocks, self.tail]

    def with_parts(self, parts: list[Tensor]) -> "BlockDiagonal":
        """Return a matrix of the same layout with other tensors."""
        return BlockDiagonal(self.layout, *parts)

    def cut(self, split_dim: int | None) -> "BlockDiagonal":
        """Return the matrix split into smaller blocks; the elements between the new blocks are dropped."""
        layout, new = self.layout, BlockLayout.of(self.layout.groups, self.layout.size, split_dim)
        if new.block >= layout.block:
            return self
        if layout.block % new.block and layout.full_blocks > 1:
            raise ValueError(f"blocks of {layout.block} cannot be cut into blocks of {new.block}: give a divisor")
        pieces = [_diagonal_blocks(part, new.block) for part in self.parts()]
        per_group = [blocks.reshape(layout.groups, -1, new.block, new.block) for blocks, _ in pieces]
        # only the last part can have a tail: the size of the others is a multiple of the new one
        return BlockDiagonal(new, torch.cat(per_group, dim=1).flatten(0, 1), pieces[-1][1])

    def add_second_moment_(self, samples: Tensor) -> None:
        """Add ``Σ x xᵀ`` over the columns of ``samples``, block by block."""
        layout = self.layout
        if layout.block == 1:
            self._diagonal().add_(samples.square().sum(-1))
            return
        head = samples[:, : layout.covered].reshape(-1, layout.block, samples.shape[-1])
        add_product_(self.blocks, head, head.mT)
        if self.tail is not None:
            rest = samples[:, layout.covered :]
            add_product_(self.tail, rest, rest.mT)

    def group(self, index: int) -> "BlockDiagonal":
        """Return the matrix of one group."""
        layout, own = self.layout, slice(index, index + 1)
        k = layout.full_blocks
        blocks = self.blocks[index * k : (index + 1) * k]
        return BlockDiagonal(
            BlockLayout(1, layout.size, layout.block), blocks, None if self.tail is None else self.tail[own]
        )

    def scale_groups_(self, scales: Tensor) -> None:
        """Multiply the matrix of each group by a number."""
        for part in self.parts():
            part.unflatten(0, (self.layout.groups, -1)).mul_(scales[:, None, None, None])

    def with_identities(self, groups: Tensor) -> "BlockDiagonal":
        """Return the matrices with identities in the place of those of some groups."""
        found = []
        for part in self.parts():
            identity = torch.eye(part.shape[-1], dtype=part.dtype, device=part.device)
            chosen = groups.repeat_interleave(len(part) // self.layout.groups)
            found.append(torch.where(chosen[:, None, None], identity, part))
        return self.with_parts(found)

    def group_traces(self) -> Tensor:
        """Return the trace of each group's matrix."""
        traces = self.blocks.diagonal(dim1=-2, dim2=-1).reshape(self.layout.groups, -1).sum(-1)
        if self.tail is not None:
            traces = traces + self.tail.diagonal(dim1=-2, dim2=-1).sum(-1)
        return traces

    def left_multiply(self, matrix: Tensor) -> Tensor:
        """Return ``self @ matrix``."""
        layout = self.layout
        if layout.block == 1:
            return self._diagonal()[..., None] * matrix
        head = matrix[:, : layout.covered].reshape(-1, layout.block, matrix.shape[-1])
        solved = product(self.blocks, head).view(layout.groups, layout.covered, -1)
        if self.tail is None:
            return solved
        return torch.cat([solved, product(self.tail, matrix[:, layout.covered :])], dim=1)

    def accumulate_right_product_(self, matrix: Tensor, scale: float, into: Tensor, decay: float) -> None:
        """Compute ``into ← decay * into + scale * matrix @ self`` without a temporary product."""
        layout = self.layout
        if layout.block == 1:
            scale_(into, decay).addcmul_(matrix, self._diagonal()[:, None], value=scale)
            return
        head, target = matrix[..., : layout.covered], into[..., : layout.covered]
        if layout.full_blocks == 1:
            add_product_(target, head, self.blocks, decay, scale)
        else:  # one batched product per group, because the strides do not allow one for all groups
            cut = (layout.full_blocks, layout.block)
            heads, targets = (tensor.unflatten(-1, cut).transpose(1, 2) for tensor in (head, target))
            blocks = self.blocks.unflatten(0, (layout.groups, layout.full_blocks))
            for one_target, one_head, block in zip(targets, heads, blocks, strict=True):
                add_product_(one_target, one_head, block, decay, scale)
        if self.tail is not None:
            add_product_(into[..., layout.covered :], matrix[..., layout.covered :], self.tail, decay, scale)

    def _diagonal(self) -> Tensor:
        """Return the diagonal of a matrix with blocks of size 1, ``(groups, n)``."""
        return self.blocks.view(self.layout.groups, self.layout.size)

    def dense(self) -> list[Tensor]:
        """Return the full matrices, with zeros outside of the blocks."""
        per_group = self.blocks.unflatten(0, (self.layout.groups, self.layout.full_blocks))
        tails = [[]] * self.layout.groups if self.tail is None else [[t] for t in self.tail]
        return [torch.block_diag(*blocks, *tail) for blocks, tail in zip(per_group, tails, strict=True)]


def scale_(into: Tensor, decay: float) -> Tensor:
    """Multiply a tensor in place; a factor of 0 overwrites even NaN, as ``beta=0`` of a matrix product does."""
    return into.mul_(decay) if decay else into.zero_()


def _diagonal_blocks(matrices: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """Return the diagonal blocks ``(count * k, size, size)`` of ``(count, n, n)``, and the tail block, if any."""
    count, n, _ = matrices.shape
    full = n // size * size
    cut = matrices[:, :full, :full].reshape(count, n // size, size, n // size, size)
    blocks = cut.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)
    return blocks, matrices[:, full:, full:].clone() if full < n else None
