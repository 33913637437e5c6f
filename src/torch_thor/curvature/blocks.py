"""Block-diagonal symmetric matrices, cut from index 0 in blocks of one size.

Layout used throughout: ``groups`` independent matrices of size ``n``, each cut into ``k = n // s`` blocks of size
``s`` and, where ``s`` does not divide ``n``, one tail block of size ``r = n % s``.

- ``blocks``: ``(groups * k, s, s)``, group-major
- ``tail``: ``(groups, r, r)``, or None
- samples: ``(groups, n, rows)``, features first: the paper's row vectors ``a`` and ``g`` are its columns

A diagonal matrix is one with blocks of size 1. Only the blocks exist in memory; the full matrix is formed by
:meth:`BlockDiagonal.dense` alone, for people.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_thor.curvature.block_layout import BlockLayout
from torch_thor.curvature.precision import add_product_, product


@dataclass
class BlockDiagonal:
    """A block-diagonal matrix (one per group) as its blocks.

    Args:
        layout: how it is cut.
        blocks: ``(groups * k, s, s)``.
        tail: ``(groups, r, r)``, or None where the block size divides.
    """

    layout: BlockLayout
    blocks: Tensor
    tail: Tensor | None

    @classmethod
    def zeros(cls, layout: BlockLayout, *, dtype: torch.dtype, device: torch.device) -> "BlockDiagonal":
        """Return zeros of a layout.

        Args:
            layout: how it is cut.
            dtype: dtype of the blocks.
            device: where they live.

        Returns:
            The zero matrix.
        """
        shape, tail = layout.shapes
        return cls(
            layout,
            torch.zeros(shape, dtype=dtype, device=device),
            None if tail is None else torch.zeros(tail, dtype=dtype, device=device),
        )

    @classmethod
    def identities(cls, layout: BlockLayout, *, dtype: torch.dtype, device: torch.device) -> "BlockDiagonal":
        """Return identity matrices of a layout.

        Args:
            layout: how it is cut.
            dtype: dtype of the blocks.
            device: where they live.

        Returns:
            The identities.
        """
        found = cls.zeros(layout, dtype=dtype, device=device)
        for part in found.parts():
            part.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return found

    def parts(self) -> list[Tensor]:
        """Return the stored tensors, each a batch of square blocks.

        Returns:
            ``[blocks]`` or ``[blocks, tail]``.
        """
        return [self.blocks] if self.tail is None else [self.blocks, self.tail]

    def with_parts(self, parts: list[Tensor]) -> "BlockDiagonal":
        """Return a matrix of the same layout from other stored tensors.

        Args:
            parts: what :meth:`parts` would give.

        Returns:
            The new matrix.
        """
        return BlockDiagonal(self.layout, parts[0], parts[1] if len(parts) > 1 else None)

    def cut(self, split_dim: int | None) -> "BlockDiagonal":
        """Return the same matrix cut into smaller blocks: what lies between the new blocks is dropped.

        Args:
            split_dim: the new block size; it divides the block size, or there is one block per group. None, or a size
                that is no smaller, changes nothing.

        Returns:
            A matrix with storage of its own; ``self`` where nothing changes.

        Raises:
            ValueError: the cuts would not fall together.
        """
        layout, new = self.layout, BlockLayout.of(self.layout.groups, self.layout.size, split_dim)
        if new.block >= layout.block:
            return self
        if layout.block % new.block and layout.full_blocks > 1:
            raise ValueError(f"blocks of {layout.block} cannot be cut into blocks of {new.block}: give a divisor")
        pieces = [_diagonal_blocks(part, new.block) for part in self.parts()]
        per_group = [blocks.reshape(layout.groups, -1, new.block, new.block) for blocks, _ in pieces]
        # only the last stored part can leave a rest: every other one is a multiple of the new size
        return BlockDiagonal(new, torch.cat(per_group, dim=1).flatten(0, 1), pieces[-1][1])

    def add_second_moment_(self, samples: Tensor) -> None:
        """Add ``Σ x xᵀ`` over the columns of ``samples``, block by block.

        Args:
            samples: ``(groups, n, rows)``, of the blocks' dtype and device.
        """
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
        """Return one of the matrices alone.

        Args:
            index: which one.

        Returns:
            Views of its blocks.
        """
        layout, own = self.layout, slice(index, index + 1)
        k = layout.full_blocks
        blocks = self.blocks[index * k : (index + 1) * k]
        return BlockDiagonal(
            BlockLayout(1, layout.size, layout.block), blocks, None if self.tail is None else self.tail[own]
        )

    def scale_groups_(self, scales: Tensor) -> None:
        """Multiply each of the matrices by a number of its own.

        Args:
            scales: ``(groups,)``.
        """
        for part in self.parts():
            part.unflatten(0, (self.layout.groups, -1)).mul_(scales[:, None, None, None])

    def where_groups(self, chosen: Tensor, other: "BlockDiagonal") -> "BlockDiagonal":
        """Return the chosen matrices, and those of another in the place of the rest.

        Args:
            chosen: ``(groups,)``, bool.
            other: of the same layout.

        Returns:
            A matrix with storage of its own.
        """
        masks = [chosen.repeat_interleave(len(part) // self.layout.groups)[:, None, None] for part in self.parts()]
        pairs = zip(masks, self.parts(), other.parts(), strict=True)
        return self.with_parts([torch.where(mask, ours, theirs) for mask, ours, theirs in pairs])

    def group_traces(self) -> Tensor:
        """Return the trace of each group's matrix.

        Returns:
            ``(groups,)``.
        """
        traces = self.blocks.diagonal(dim1=-2, dim2=-1).reshape(self.layout.groups, -1).sum(-1)
        if self.tail is not None:
            traces = traces + self.tail.diagonal(dim1=-2, dim2=-1).sum(-1)
        return traces

    def left_multiply(self, matrix: Tensor) -> Tensor:
        """Return ``self @ matrix``.

        Args:
            matrix: ``(groups, n, m)``.

        Returns:
            ``(groups, n, m)``.
        """
        layout = self.layout
        if layout.block == 1:
            return self._diagonal()[..., None] * matrix
        head = matrix[:, : layout.covered].reshape(-1, layout.block, matrix.shape[-1])
        solved = product(self.blocks, head).view(layout.groups, layout.covered, -1)
        if self.tail is None:
            return solved
        return torch.cat([solved, product(self.tail, matrix[:, layout.covered :])], dim=1)

    def accumulate_right_product_(self, matrix: Tensor, scale: float, into: Tensor, decay: float) -> None:
        """``into ← decay * into + scale * matrix @ self``, the product never formed on its own.

        Args:
            matrix: ``(groups, m, n)``.
            scale: a number.
            into: ``(groups, m, n)``, changed in place.
            decay: a number; with 0 what stood in ``into`` does not matter, not even NaN.
        """
        layout = self.layout
        if layout.block == 1:
            scale_(into, decay).addcmul_(matrix, self._diagonal()[:, None], value=scale)
            return
        head, target = matrix[..., : layout.covered], into[..., : layout.covered]
        if layout.full_blocks == 1:
            add_product_(target, head, self.blocks, decay, scale)
        else:  # a batch for each group: the strides of all do not make one
            cut = (layout.full_blocks, layout.block)
            heads, targets = (tensor.unflatten(-1, cut).transpose(1, 2) for tensor in (head, target))
            blocks = self.blocks.unflatten(0, (layout.groups, layout.full_blocks))
            for one_target, one_head, block in zip(targets, heads, blocks, strict=True):
                add_product_(one_target, one_head, block, decay, scale)
        if self.tail is not None:
            add_product_(into[..., layout.covered :], matrix[..., layout.covered :], self.tail, decay, scale)

    def _diagonal(self) -> Tensor:
        """Return the numbers of a diagonal matrix (blocks of size 1), ``(groups, n)``: products are elementwise."""
        return self.blocks.view(self.layout.groups, self.layout.size)

    def dense(self) -> list[Tensor]:
        """Return the full matrices, zeros between the blocks.

        Returns:
            One ``(n, n)`` tensor per group.
        """
        per_group = self.blocks.unflatten(0, (self.layout.groups, self.layout.full_blocks))
        tails = [[]] * self.layout.groups if self.tail is None else [[t] for t in self.tail]
        return [torch.block_diag(*blocks, *tail) for blocks, tail in zip(per_group, tails, strict=True)]


def scale_(into: Tensor, decay: float) -> Tensor:
    """Multiply a tensor in place; 0 overwrites it, whatever it held, as ``beta=0`` of a matrix product does.

    Args:
        into: the tensor.
        decay: a number.

    Returns:
        The tensor.
    """
    return into.mul_(decay) if decay else into.zero_()


def _diagonal_blocks(matrices: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """Return the diagonal blocks ``(count * k, size, size)`` of ``(count, n, n)``, and the rest where ``n % size``."""
    count, n, _ = matrices.shape
    full = n // size * size
    cut = matrices[:, :full, :full].reshape(count, n // size, size, n // size, size)
    blocks = cut.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)
    return blocks, matrices[:, full:, full:].clone() if full < n else None
