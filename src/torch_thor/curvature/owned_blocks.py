"""Factors of which every process keeps only the blocks that it inverts (the option ``divide_curvature``).

Blocks are dealt out by their cost (:mod:`torch_thor.distributed.ownership`). In the state of the weight, a process has
its own blocks of each factor and of its inverse; the whole inverse is collected for a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_thor.curvature.block_layout import BlockLayout
from torch_thor.curvature.blocks import BlockDiagonal


@dataclass(frozen=True)
class BlockOwners:
    """Which process keeps which blocks of a factor."""

    layout: BlockLayout  # the layout of the whole factor
    bounds: tuple[tuple[int, ...], ...]  # for each of its tensors of blocks, one index more than there are processes
    rank: int  # the rank of this process

    @property
    def own(self) -> list[slice]:
        """The blocks that this process keeps, of each tensor of blocks."""
        return [slice(bounds[self.rank], bounds[self.rank + 1]) for bounds in self.bounds]

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int] | None]:
        """The shapes of the blocks and of the tail blocks that this process keeps; None without a tail."""
        of_whole = [shape for shape in self.layout.shapes if shape is not None]
        found = [(own.stop - own.start, *shape[1:]) for own, shape in zip(self.own, of_whole, strict=True)]
        return found[0], found[1] if len(found) > 1 else None

    def take(self, whole: BlockDiagonal) -> "OwnedBlocks":
        """Return the blocks of this process."""
        return OwnedBlocks(self, [part[own].clone() for part, own in zip(whole.parts(), self.own, strict=True)])


@dataclass(frozen=True)
class OwnedBlocks:
    """The blocks of a factor, or of an inverse, that this process keeps."""

    owners: BlockOwners  # which process keeps which blocks
    own: Sequence[Tensor]  # the blocks of this process, and its tail blocks if the layout has a tail

    def parts(self) -> list[Tensor]:
        """Return the blocks."""
        return list(self.own)

    def spread(self) -> BlockDiagonal:
        """Return a matrix of the whole layout, with zeros for the blocks of the other processes."""
        whole = BlockDiagonal.zeros(self.owners.layout, dtype=self.own[0].dtype, device=self.own[0].device)
        for part, own, blocks in zip(whole.parts(), self.owners.own, self.own, strict=True):
            part[own] = blocks
        return whole

    def group_traces(self) -> Tensor:
        """Return the sum of the traces of these blocks for each group."""
        found = self.own[0].new_zeros(self.owners.layout.groups)
        for blocks, own in zip(self.own, self.owners.own, strict=True):
            if len(blocks):
                found.index_add_(0, self._groups_of(blocks, own), blocks.diagonal(dim1=-2, dim2=-1).sum(-1))
        return found

    def with_identities(self, groups: Tensor) -> "OwnedBlocks":
        """Return the blocks with identities for those of some groups."""
        found = []
        for blocks, own in zip(self.own, self.owners.own, strict=True):
            identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
            chosen = groups[self._groups_of(blocks, own)]
            found.append(torch.where(chosen[:, None, None], identity, blocks))
        return OwnedBlocks(self.owners, found)

    def _groups_of(self, blocks: Tensor, own: slice) -> Tensor:
        layout = self.owners.layout
        of_one_group = 1 if blocks is not self.own[0] else layout.full_blocks
        return torch.arange(own.start, own.stop, device=blocks.device) // of_one_group
