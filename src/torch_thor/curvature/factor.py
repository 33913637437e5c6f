"""The factors of a layer and their damped inverses, in the optimizer's state of the weight.

Each is a tensor of rows (:mod:`torch_thor.curvature.blocks`), which its layout describes
(:mod:`torch_thor.curvature.layout`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.layout import Layout
from torch_thor.curvature.view import ParameterView


@dataclass(frozen=True, eq=False)
class Factor:
    """``A`` or ``G`` of one layer, and its inverse, as they are bound to a state."""

    side: str
    view: ParameterView  # of the weight
    layout: Layout

    def make_zeros(self, dtype: torch.dtype, device: torch.device) -> None:
        """Add zeros for the tensors that the state lacks."""
        state, shape = self.view.state, self.layout.shape
        shards = self.view.shards if self.layout.by_rows else None
        for key in self.layout.keys:
            if key in state:
                continue
            if shards is None:
                state[key] = torch.zeros(shape, dtype=dtype, device=device)
            else:
                local_shape = (shards.local.stop - shards.local.start, shape[1])
                state[key] = shards.wrap(torch.zeros(local_shape, dtype=dtype, device=device))

    def read(self, *, inverse: bool = False) -> Blocks:
        """Return this process's blocks of the factor or of its inverse, as views of the state."""
        stored = self.view.state[self.layout.keys[inverse]]
        rows = stored if type(stored) is Tensor else local(stored)
        if self.layout.by_rows and self.view.local_rows is not None:
            rows = rows[self.view.local_rows]
        return Blocks(self.layout.local, rows)

    def with_zeros(self, *, inverse: bool) -> Blocks:
        """Return the blocks of all rows, with zeros for those that other processes keep alone."""
        kept, block_sizes, owners = (
            self.read(inverse=inverse),
            self.layout.block_sizes,
            self.layout.owners,
        )
        assert owners is not None
        full = Blocks(block_sizes, kept.rows.new_zeros(block_sizes.rows, block_sizes.width))
        for into, part in zip(owners.local_parts(full.parts), kept.parts, strict=True):
            into.copy_(part)
        return full

    def dense(self, *, inverse: bool) -> list[Tensor]:
        """Return the matrix of each group, with zeros outside of the blocks.

        All processes that divide it must call this.
        """
        if self.layout.is_partitioned:
            return collected([self], inverse=inverse)[0].dense()
        if self.layout.owners is None:
            return self.read(inverse=inverse).dense()
        stored: Any = self.view.state[self.layout.keys[inverse]]
        return Blocks(self.layout.block_sizes, self.view.of(stored.full_tensor())).dense()


def collected(factors: Sequence[Factor], *, inverse: bool) -> list[Blocks]:
    """Collect divided factors, or their inverses, from all processes, which must all call it."""
    gathered = [factor.with_zeros(inverse=inverse) for factor in factors]
    parts = [part for blocks in gathered for part in blocks.parts]
    owners = [factor.layout.owners for factor in factors if factor.layout.owners is not None]
    if owners:
        bounds = [of_run for of_factor in owners for of_run in of_factor.bounds]
        owners[0].processes.share_(parts, bounds)
    return gathered


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    to_local = None if type(tensor) is Tensor else getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
