"""The statistics of one layer in the current step: sums over its rows, which are not part of checkpoints."""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.parameter_view import ParameterView
from torch_thor.curvature.precision import factor_dtype, ieee_float32
from torch_thor.curvature.row_shards import Layout, ShardedBlocks, ShardedLayout

Factors = tuple[BlockDiagonal, ...]  # one per side, in the order of LayerCurvature.sides
Sums = tuple[BlockDiagonal | ShardedBlocks, ...]  # the same for a new factor, or for the share of one process in it


class Statistics:
    """``Σ a aᵀ`` and ``Σ g gᵀ`` over the rows of the current step, and the number of rows."""

    def __init__(self, kind: Kind, weight: ParameterView, layouts: Callable[[], Mapping[str, Layout]]) -> None:
        self._weight, self._layouts = weight, layouts
        self._sums: Sums | None = None
        self.rows = 0  # R of this step so far
        self.group_rows = [0] * kind.groups if kind.routed else []  # R of each group, if groups have their own rows

    # ---- adding rows --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(
        self, kind: Kind, x: Tensor, g: Tensor, keep: Tensor | None = None, instead_of: Tensor | None = None
    ) -> None:
        """Add the rows of one forward and backward pass through the layer."""
        if not x.numel() or not g.numel():  # an empty batch has no rows
            return
        # kinds add rows to the blocks of all processes in the same way
        x, g, (a_sum, g_sum) = x.detach(), g.detach(), cast(Factors, self.sums())
        with ieee_float32(x.device.type):
            if instead_of is None:
                rows = kind.add_inputs_(a_sum, x, g.shape, keep)
                self.rows += rows if isinstance(rows, int) else self._count_groups(rows)
                kind.add_outputs_(g_sum, x, g, keep)
                return
            old = g_sum.with_parts([torch.zeros_like(p) for p in g_sum.parts()])
            kind.add_outputs_(old, x, instead_of, keep)
            kind.add_outputs_(g_sum, x, g, keep)
            for part, old_part in zip(g_sum.parts(), old.parts(), strict=True):
                part.sub_(old_part)

    @torch.no_grad()
    def gather_inputs(self, kind: Kind, x: Tensor, output: torch.Size, keep: Tensor | None, most: int) -> None:
        """Add the rows of one forward pass through the layer, for a layer that has A alone."""
        if x.numel() and output.numel():
            (a_sum,) = cast(Factors, self.sums())
            with ieee_float32(x.device.type):
                rows = kind.add_inputs_(a_sum, x.detach(), output, keep, most)
            self.rows += rows if isinstance(rows, int) else self._count_groups(rows)

    @torch.no_grad()
    def add(self, other: "Statistics") -> None:
        """Add the rows that were gathered for the same layer elsewhere."""
        if other._sums is None:
            return
        for own, more in zip(self.sums(), other._sums, strict=True):
            for part, its_part in zip(own.parts(), more.parts(), strict=True):
                part.add_(its_part)
        self.rows += other.rows
        for group, rows in enumerate(other.group_rows):
            self.group_rows[group] += rows

    def _count_groups(self, rows: list[int]) -> int:
        self.group_rows = [n + more for n, more in zip(self.group_rows, rows, strict=True)]
        return sum(rows)

    def scale_outputs_(self, scale: float) -> None:
        """Turn the gathered output gradients into gradients of one loss term."""
        if self._sums is not None and len(self._sums) > 1:
            for part in self._sums[1].parts():
                # in two products, because scale² can overflow float32 if the loss is scaled for half precision
                part.mul_(scale).mul_(scale)

    # ---- reading and dropping the sums --------------------------------------------------------------------------

    def sums(self) -> Sums:
        """Return ``Σ a aᵀ`` and ``Σ g gᵀ`` of this step so far, to which rows can be added."""
        if self._sums is None:
            view, weight = self._weight, self._weight.module._parameters.get(self._weight.attribute)
            # FSDP2 may keep a parameter on the CPU and in another dtype than the one that it computes with
            device = (view.parameter if weight is None else weight).device
            dtype = factor_dtype((view.parameter if weight is None or view.shards is not None else weight).dtype)
            self._sums = tuple(_zeros(layout, dtype, device) for layout in self._layouts().values())
        return self._sums

    def gathered(self) -> Sums | None:
        """Return the sums of this step so far."""
        return self._sums if self.rows else None

    def means(self) -> Sums | None:
        """Return A and G, the means over the rows of this step, and drop the rows."""
        sums, rows = self._sums, self.rows
        self.forget()
        if sums is None or not rows:
            return None
        for factor in sums:
            for part in factor.parts():
                part.div_(rows)
        return sums

    def forget(self) -> None:
        """Drop the statistics of this step."""
        self._sums, self.rows = None, 0
        if self.group_rows:
            self.group_rows = [0] * len(self.group_rows)

    # ---- adapting to changes of the layer -----------------------------------------------------------------------

    def are_cut_otherwise(self) -> bool:
        """Return whether the sums have other blocks than the factors, after the split dimension was changed."""
        pairs = zip(self._sums or (), self._layouts().values(), strict=False)
        return any(one.layout != layout for one, layout in pairs)

    def cut(self) -> None:
        """Split the sums into smaller blocks, after the split dimension has become smaller."""
        if self._sums is not None:
            layouts = self._layouts().values()
            self._sums = tuple(one.cut(layout.block) for one, layout in zip(self._sums, layouts, strict=True))

    def follow_weight(self) -> None:
        """Move and convert the sums to the device and dtype of the weight, if it was converted after a forward pass."""
        if self._sums is not None:
            weight = self._weight.parameter
            device, dtype = weight.device, factor_dtype(weight.dtype)
            self._sums = tuple(one.with_parts([part.to(device, dtype) for part in one.parts()]) for one in self._sums)


def _zeros(layout: Layout, dtype: torch.dtype, device: torch.device) -> BlockDiagonal | ShardedBlocks:
    if isinstance(layout, ShardedLayout):
        return ShardedBlocks.zeros(layout, dtype=dtype, device=device)
    return BlockDiagonal.zeros(layout, dtype=dtype, device=device)
