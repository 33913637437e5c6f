"""A factor of a layer and its damped inverse, as tensors in the optimizer's state of the weight.

Each is a tensor of rows (:mod:`torch_thor.curvature.blocks`). The factor that belongs to the rows of the weight has as
many rows, and the layers that are rows of one weight share it; if the weight is divided (FSDP2), it is divided in the
same way, so a checkpoint of some processes can be loaded on others. Every other factor is held by all processes, unless
curvature is divided: then each holds the rows of the blocks that it inverts.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks, Cut
from torch_thor.curvature.kinds.base import Kind
from torch_thor.curvature.parameter_view import ParameterView
from torch_thor.curvature.processes import Processes
from torch_thor.curvature.shards import Owners, bounds_within, local, side_of_rows, why_not_by_rows


class Factor:
    """``A`` or ``G`` of one layer."""

    def __init__(self, side: str, kind: Kind, weight: ParameterView, prefix: str) -> None:
        self.side, self._kind, self._weight, self._prefix = side, kind, weight, prefix
        self._found: tuple[Any, Any, Cut, Owners | None] | None = None
        self.divided: Owners | None = None  # the owners of the blocks, if curvature is divided (divide_curvature)
        self.exchange: Processes | None = None  # with the other owners
        self.whole: Blocks | None = None  # the inverse for a step; while it is collected, if curvature is divided

    # ---- where its blocks are --------------------------------------------------------------------------------------

    @cached_property
    def of_rows(self) -> bool:
        """Whether it belongs to the rows of the weight."""
        return self.side == side_of_rows(self._kind) and why_not_by_rows(self._kind, self._weight.shape) is None

    @property
    def by_rows(self) -> bool:
        """Whether its tensors have the rows of the weight."""
        return self.of_rows and self.divided is None

    def _cut_and_owners(self) -> tuple[Cut, Owners | None]:
        split_dim, shards = self._weight.split_dim, self._weight.shards
        found = self._found
        if found is None or found[0] != split_dim or found[1] is not shards:
            kind = self._kind
            rows = kind.inputs if self.side == "A" else kind.outputs
            split = 1 if self.side == "A" and kind.diagonal_input else split_dim
            cut, owners = Cut.of(rows, split, kind.groups), None
            if shards is not None and self.of_rows:
                cut = Cut.of(rows, split, edges=bounds_within(shards.bounds, self._weight.rows))
                owners = Owners.of_shards(cut, shards, self._weight.rows)
            found = self._found = split_dim, shards, cut, owners
        return found[2], found[3]

    @property
    def cut(self) -> Cut:
        """Where the rows of all processes are cut, for the current ``split_dim`` of the weight's parameter group."""
        return self._cut_and_owners()[0]

    @property
    def owners(self) -> Owners | None:
        """The owners of the blocks, if every process keeps a part of them alone; else None."""
        return self._cut_and_owners()[1] if self.divided is None else self.divided

    @property
    def held(self) -> Cut:
        """Where the rows are cut that this process holds."""
        owners = self.owners
        return self.cut if owners is None else self.cut.held(owners.bounds, owners.source)

    @property
    def width(self) -> int:
        """The number of columns of its tensors; the same for all layers that are rows of one weight."""
        longest, split_dim = self._weight.longest, self._weight.split_dim
        # not as the cut has it: the blocks of all shards may have one row, and not those of a later division
        if not self.by_rows or (self.side == "A" and self._kind.diagonal_input):
            return self.cut.width
        return longest if split_dim is None else min(split_dim, longest)

    # ---- its tensors -----------------------------------------------------------------------------------------------

    def key(self, inverse: bool) -> str:
        """Return the key in the state of the weight."""
        return ("" if self.by_rows else self._prefix) + self.side + ("_inverse" if inverse else "")

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of its tensors, those of all processes if the weight is divided."""
        rows = self._weight.shape[0] if self.by_rows else self.held.rows
        return {self.key(inverse): (rows, self.width) for inverse in (False, True)}

    def make_zeros(self, dtype: torch.dtype, device: torch.device) -> None:
        """Add zeros for the tensors that the state lacks."""
        state, shards = self._weight.state, self._weight.shards
        for key, shape in self.shapes().items():
            if key in state:
                continue
            if shards is not None and self.by_rows:
                own = shards.own.stop - shards.own.start
                state[key] = shards.wrap(torch.zeros((own, shape[1]), dtype=dtype, device=device))
            else:
                state[key] = torch.zeros(shape, dtype=dtype, device=device)

    def read(self, *, inverse: bool = False) -> Blocks:
        """Return the blocks of the factor, or of its inverse, that this process holds; views of the state."""
        rows = local(self._weight.state[self.key(inverse)])
        if self.by_rows and self._weight.local_rows is not None:
            rows = rows[self._weight.local_rows]
        return Blocks(self.held, rows)

    def prepare(self) -> None:
        """Look up the inverse for the steps until the next refresh, unless steps collect it."""
        self.whole = self.read(inverse=True) if self.divided is None else None

    def spread(self, *, inverse: bool) -> Blocks:
        """Return the blocks of all rows, with zeros for those that other processes keep (``divide_curvature``)."""
        own, owners = self.read(inverse=inverse), self.owners
        assert owners is not None
        whole, parts = Blocks.zeros(self.cut, own.dtype, own.rows.device), iter(own.parts)
        for i, part in enumerate(whole.parts):
            held = owners.held(i)
            if held.start < held.stop:
                part[held] = next(parts)
        return whole

    def dense(self, *, inverse: bool) -> list[Tensor]:
        """Return the matrix of each group, with zeros outside of the blocks; all processes that divide it must call."""
        if self.divided is not None:
            return collected([self], inverse=inverse)[0].dense()
        stored: Any = self._weight.state[self.key(inverse)]
        if self.owners is None:
            return self.read(inverse=inverse).dense()
        return Blocks(self.cut, self._weight.of(stored.full_tensor())).dense()


def collected(factors: Sequence[Factor], *, inverse: bool) -> list[Blocks]:
    """Collect divided factors, or their inverses, from all processes, which must all call it."""
    found = [factor.spread(inverse=inverse) for factor in factors]
    parts = [part for whole in found for part in whole.parts]
    exchange = next((factor.exchange for factor in factors), None)
    if exchange is not None:
        exchange.share_(parts, [bounds for factor in factors for bounds in (factor.owners or Owners((), 0)).bounds])
    return found
