"""The factors of a layer and their inverses, as tensors in the optimizer's state of its weight.

The factor of the rows of a weight is stored as a matrix with as many rows as the weight
(:mod:`torch_thor.curvature.factor_rows`). If the rows of the weight are divided among processes (FSDP2), those of the
matrix are divided in the same way, so a checkpoint of some processes can be loaded on others. The layers that are rows
of one weight share the matrix. Every other factor is stored as ``blocks`` and ``tail`` of
:class:`torch_thor.curvature.blocks.BlockDiagonal`; all processes hold it.

Or every process keeps the blocks alone that it inverts (:mod:`torch_thor.curvature.owned_blocks`), of all factors that
are not divided with the rows of the weight. They are then stored as ``blocks`` and ``tail``.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.block_layout import BlockLayout
from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.factor_rows import from_rows
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.owned_blocks import BlockOwners, OwnedBlocks
from torch_thor.curvature.parameter_view import ParameterView
from torch_thor.curvature.processes import BlockExchange
from torch_thor.curvature.row_shards import Layout, RowShards, ShardedLayout, local, side_of_rows, why_not_by_rows


class StoredFactors:
    """The tensors of one layer in the state of its weight."""

    def __init__(self, kind: Kind, weight: ParameterView, prefix: str, sides: tuple[str, ...]) -> None:
        self._kind, self._weight, self._prefix, self._sides = kind, weight, prefix, sides
        self._layouts: dict[str, Layout] = {}
        self._of: tuple[Any, RowShards | None] = None, None  # split_dim and shards for which they were found
        self._inverses: dict[str, tuple[str, Tensor, BlockDiagonal]] = {}  # a cache: key, entry and the matrix of it
        # the sides of which this process keeps its own blocks alone
        self.owners: Mapping[str, BlockOwners] = {}
        self.exchange: BlockExchange | None = None  # with the other processes, if there are such sides
        self.collected: Mapping[str, BlockDiagonal] = {}  # their whole inverses, while they are used

    @property
    def side_by_rows(self) -> str | None:
        """The side that is stored with as many rows as the weight."""
        side = self.whole_side_by_rows
        return None if side in self.owners else side

    @cached_property
    def whole_side_by_rows(self) -> str | None:
        """:attr:`side_by_rows` if no side were divided by its blocks."""
        side = side_of_rows(self._kind)
        return side if side in self._sides and why_not_by_rows(self._kind, self._weight.shape) is None else None

    def layouts(self) -> dict[str, Layout]:
        """Return the layout of each side for the current ``split_dim`` of the weight's parameter group."""
        weight, kind = self._weight, self._kind
        split_dim, shards = weight.options.get("split_dim"), weight.shards
        if not self._layouts or split_dim != self._of[0] or shards is not self._of[1]:
            splits = {"A": 1 if kind.diagonal_input else weight.split_dim, "G": weight.split_dim}
            self._of, self._layouts = (split_dim, shards), {}
            for side, size in (("A", kind.inputs), ("G", kind.outputs)):
                if side not in self._sides:
                    continue
                if shards is not None and side == self.side_by_rows:
                    own = shards.own_of(weight.rows)
                    bounds = shards.bounds_of(weight.rows)
                    self._layouts[side] = ShardedLayout(bounds, splits[side], own.stop - own.start, shards.source)
                else:
                    self._layouts[side] = BlockLayout.of(kind.groups, size, splits[side])
        return self._layouts

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that the state must have."""
        found: dict[str, tuple[int, ...]] = {}
        for side, layout in self.layouts().items():
            for name in (side, f"{side}_inverse"):
                if side == self.side_by_rows:
                    found[name] = (self._weight.shape[0], self.width(side))
                    continue
                assert isinstance(layout, BlockLayout)  # no other factor is divided with the rows of the weight
                owners = self.owners.get(side)
                # another layout means that the block size has changed, and then the tensors do not fit
                blocks, tail = layout.shapes if owners is None or owners.layout != layout else owners.shapes
                found[self._prefix + name] = blocks
                if tail is not None:
                    found[f"{self._prefix}{name}_tail"] = tail
        return found

    def divided_keys(self) -> list[str]:
        """Return the keys of the tensors of which this process keeps its own blocks alone."""
        names = [self._prefix + side for side in self.owners]
        return [key for key in self.shapes() if key.removesuffix("_tail").removesuffix("_inverse") in names]

    def make_zeros(self, dtype: torch.dtype, device: torch.device) -> None:
        """Add zeros for all tensors that the state lacks."""
        state, shards = self._weight.state, self._weight.shards
        for key, shape in self.shapes().items():
            if key in state:
                continue
            if shards is not None and key.removesuffix("_inverse") == self.side_by_rows:
                own = shards.own.stop - shards.own.start
                state[key] = shards.wrap(torch.zeros((own, shape[1]), dtype=dtype, device=device))
            else:
                state[key] = torch.zeros(shape, dtype=dtype, device=device)

    def are_there(self) -> bool:
        """Return whether the state has a tensor of the layer."""
        return any(key in self._weight.state for key in self.shapes())

    def read(self, name: str) -> BlockDiagonal | OwnedBlocks:
        """Return the part of a factor or an inverse that this process holds."""
        if name[0] in self.owners:
            entries, key = self._weight.state, self._prefix + name
            parts = [entries[key], entries[f"{key}_tail"]] if f"{key}_tail" in entries else [entries[key]]
            return OwnedBlocks(self.owners[name[0]], parts)
        return self._read_matrix(name)

    def _read_matrix(self, name: str) -> BlockDiagonal:
        layout, state = self.layouts()[name[0]], self._weight.entries or {}
        local_layout = layout.local if isinstance(layout, ShardedLayout) else layout
        if name[0] == self.side_by_rows:
            rows = local(state[name])
            return from_rows(rows if self._weight.local_rows is None else rows[self._weight.local_rows], local_layout)
        key = self._prefix + name
        return BlockDiagonal(local_layout, state[key], state.get(f"{key}_tail"))

    def inverse(self, side: str) -> BlockDiagonal:
        """Return the part of an inverse that this process holds."""
        if side in self.owners:
            return self.collected[side]
        entries, found = self._weight.entries, self._inverses.get(side)
        if found is None or entries is None or found[1] is not entries.get(found[0]):
            name = f"{side}_inverse"
            key = name if side == self.side_by_rows else self._prefix + name
            found = self._inverses[side] = key, self._weight.state[key], self._read_matrix(name)
        return found[2]

    def write(self, name: str, matrix: BlockDiagonal | OwnedBlocks) -> None:
        """Store the part of a factor or an inverse that this process holds."""
        state = self._weight.entries
        assert state is not None  # it has been created before the first refresh
        if name[0] == self.side_by_rows:
            for old, new in zip(self.read(name).parts(), matrix.parts(), strict=True):
                old.copy_(new)
            return
        key = self._prefix + name
        state.update(zip((key, f"{key}_tail"), matrix.parts(), strict=False))

    def whole(self, names: Sequence[str]) -> list[BlockDiagonal]:
        """Collect factors or inverses of which every process keeps its own blocks; all processes must call it."""
        found: list[BlockDiagonal] = []
        parts: list[Tensor] = []
        bounds: list[tuple[int, ...]] = []
        for name in names:
            own = self.read(name)
            assert isinstance(own, OwnedBlocks)
            found.append(own.spread())
            parts += found[-1].parts()
            bounds += own.owners.bounds
        assert self.exchange is not None
        self.exchange.share_(parts, bounds)
        return found

    def dense(self, name: str) -> list[Tensor]:
        """Return a factor or an inverse as full matrices, with zeros outside of the blocks."""
        layout = self.layouts()[name[0]]
        if name[0] in self.owners:
            return self.whole([name])[0].dense()
        if not isinstance(layout, ShardedLayout):
            return self._read_matrix(name).dense()
        stored: Any = self._weight.state[name]
        rows = self._weight.of(stored.full_tensor())
        blocks = []
        for first, last in zip(layout.bounds, layout.bounds[1:], strict=False):
            if first < last:
                of_shard = BlockLayout.of(1, last - first, layout.split_dim)
                blocks += from_rows(rows[first:last], of_shard).dense()
        return [torch.block_diag(*blocks)]

    def width(self, side: str) -> int:
        """Return the number of columns of a factor that is stored as rows; the same for all layers of a weight."""
        longest, split_dim = self._weight.longest, self._weight.split_dim
        if side == "A" and self._kind.diagonal_input:
            return 1
        return longest if split_dim is None else min(split_dim, longest)
