"""The statistics of one layer in the current step: sums over its rows, which are not part of checkpoints."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.factor import Factor
from torch_thor.curvature.kinds.base import Kind
from torch_thor.curvature.parameter_view import ParameterView
from torch_thor.curvature.precision import factor_dtype, ieee_float32


class Statistics:
    """``Σ a aᵀ`` and ``Σ g gᵀ`` over the rows of the current step, and the number of rows."""

    def __init__(self, kind: Kind, weight: ParameterView, factors: Sequence[Factor]) -> None:
        self._weight, self._factors = weight, factors
        self._sums: list[Blocks] | None = None  # one for each factor, of the blocks of all processes
        self.rows = 0  # R of this step so far
        self.group_rows = [0] * kind.groups if kind.routed else []  # R of each group, if groups have their own rows

    @torch.no_grad()
    def gather(
        self, kind: Kind, x: Tensor, g: Tensor, keep: Tensor | None = None, instead_of: Tensor | None = None
    ) -> None:
        """Add the rows of one forward and backward pass; or with ``instead_of``, replace gradients added before."""
        if not x.numel() or not g.numel():  # an empty batch has no rows
            return
        x, g, (a_sum, g_sum) = x.detach(), g.detach(), self.sums()
        with ieee_float32(x.device.type):
            if instead_of is None:
                self._count(kind.add_inputs_(a_sum, x, g.shape, keep))
                kind.add_outputs_(g_sum, x, g, keep)
                return
            old = Blocks(g_sum.cut, torch.zeros_like(g_sum.rows))
            kind.add_outputs_(old, x, instead_of, keep)
            kind.add_outputs_(g_sum, x, g, keep)
            g_sum.rows.sub_(old.rows)

    @torch.no_grad()
    def gather_inputs(self, kind: Kind, x: Tensor, output: torch.Size, keep: Tensor | None, most: int) -> None:
        """Add the rows of one forward pass through the layer, for a layer that has A alone."""
        if x.numel() and output.numel():
            with ieee_float32(x.device.type):
                self._count(kind.add_inputs_(self.sums()[0], x.detach(), output, keep, most))

    @torch.no_grad()
    def add(self, other: "Statistics") -> None:
        """Add the rows that were gathered for the same layer elsewhere."""
        if other._sums is None:
            return
        for own, more in zip(self.sums(), other._sums, strict=True):
            own.rows.add_(more.rows)
        self._count(other.group_rows or other.rows)

    def _count(self, rows: int | list[int]) -> None:
        if isinstance(rows, int):
            self.rows += rows
        else:
            self.group_rows = [n + more for n, more in zip(self.group_rows, rows, strict=True)]
            self.rows += sum(rows)

    def scale_outputs_(self, scale: float) -> None:
        """Turn the gathered output gradients into gradients of one loss term."""
        if self._sums is not None and len(self._sums) > 1:
            # in two products, because scale² can overflow float32 if the loss is scaled for half precision
            self._sums[1].rows.mul_(scale).mul_(scale)

    def sums(self) -> list[Blocks]:
        """Return ``Σ a aᵀ`` and ``Σ g gᵀ`` of this step so far, to which rows can be added."""
        if self._sums is None:
            view, weight = self._weight, self._weight.module._parameters.get(self._weight.attribute)
            # FSDP2 may keep a parameter on the CPU and in another dtype than the one that it computes with
            device = (view.parameter if weight is None else weight).device
            dtype = factor_dtype((view.parameter if weight is None or view.shards is not None else weight).dtype)
            self._sums = [Blocks.zeros(factor.cut, dtype, device) for factor in self._factors]
        return self._sums

    def gathered(self) -> list[Blocks] | None:
        """Return the sums of this step so far; None without rows."""
        return self._sums if self.rows else None

    def take(self, terms: int) -> list[Blocks] | None:
        """Return the factors of the rows of this step, and drop the rows; None if there are none.

        They are means. Of groups with their own rows they are ``√T_e A_e`` and ``√T_e G_e``
        (:mod:`torch_thor.curvature.kinds.experts`); without G, plain means.
        """
        sums, rows, group_rows = self.gathered(), self.rows, self.group_rows
        self.forget()
        for factor in sums or ():
            if not group_rows:
                factor.rows.div_(rows)
                continue
            counts = factor.rows.new_tensor(group_rows)
            mean = counts.clamp(min=1).reciprocal()
            factor.scale_groups_(mean if len(self._factors) == 1 else (counts * terms).clamp(min=1).rsqrt())
        return sums

    def forget(self) -> None:
        """Drop the statistics of this step."""
        self._sums, self.rows = None, 0
        if self.group_rows:
            self.group_rows = [0] * len(self.group_rows)

    def are_cut_otherwise(self) -> bool:
        """Return whether the sums have other blocks than the factors, after the split dimension was changed."""
        return any(one.cut != factor.cut for one, factor in zip(self._sums or (), self._factors, strict=False))

    def follow_weight(self) -> None:
        """Move and convert the sums to the device and dtype of the weight, if it was converted after a forward pass."""
        if self._sums is not None:
            weight = self._weight.parameter
            device, dtype = weight.device, factor_dtype(weight.dtype)
            self._sums = [Blocks(one.cut, one.rows.to(device, dtype)) for one in self._sums]
