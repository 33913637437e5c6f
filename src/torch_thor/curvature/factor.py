"""A view of a parameter or of some of its rows, and its factors and damped inverses.

Factors and inverses are in the optimizer's state of the parameter.

Each is a tensor of rows (:mod:`torch_thor.curvature.blocks`). The factor that belongs to the rows
of the weight has as many rows, and the layers that are rows of one weight share it; if the weight
is divided (FSDP2), it is divided in the same way, so a checkpoint of some processes can be loaded
on others. Every other factor is held by all processes, unless curvature is divided: then each holds
the rows of the blocks that it inverts.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks, Cut, has_values
from torch_thor.curvature.communication import Processes
from torch_thor.curvature.kinds.base import Kind
from torch_thor.curvature.shards import (
    Owners,
    RowShards,
    bounds_within,
    why_not_by_rows,
)

State = MutableMapping[str, Any]


class ParameterView:
    """A parameter of a module, or rows of one."""

    # The parameter is looked up in the module each time, because wrappers replace it. The plan
    # binds the view to the optimizer's state and options. The rows of a parameter may be divided
    # among processes (FSDP2); its state then has the rows that this process holds.

    def __init__(self, module: nn.Module, attribute: str, rows: slice | None = None) -> None:
        self.module, self.attribute, self.rows = module, attribute, rows
        self.state: State = {}  # the optimizer's state of the parameter; empty while there is none
        self.options: Mapping[str, Any] = {}  # the parameter's group; empty while there is none
        # how its rows are divided; None if every process holds all of them
        self.shards: RowShards | None = None
        self.local_rows = rows  # ``rows`` in the part of the parameter that this process holds
        self.longest = 0  # the largest number of rows of the layers that are rows of this parameter
        self._divided: nn.Parameter | None = None  # the parameter, if its rows are divided

    def bind(
        self,
        state: State | None,
        options: Mapping[str, Any],
        parameter: nn.Parameter | None = None,
        shards: RowShards | None = None,
    ) -> None:
        """Bind the view to the parameter's optimizer state and to the options of its group."""
        self.state, self.options, self.shards = {} if state is None else state, options, shards
        self._divided = None if shards is None else parameter
        self.local_rows = (
            self.rows if shards is None or self.rows is None else shards.own_of(self.rows)
        )

    @property
    def parameter(self) -> nn.Parameter:
        """The whole parameter."""
        found = self.present
        if found is None:
            found = getattr(self.module, self.attribute)  # a lookup that the module defines itself
        if not isinstance(found, nn.Parameter):
            raise RuntimeError(
                f"{self.attribute!r} of {self.module} is no parameter any more: it was pruned or "
                "parametrised after the optimizer was made, and is computed from other "
                "parameters. The next step trains those plainly"
            )
        return found

    @property
    def present(self) -> nn.Parameter | None:
        """The parameter that is trained.

        It is None if the module has none, or computes it from others (pruning).
        """
        if self._divided is not None:  # while modules run, FSDP2 replaces it by the whole parameter
            return self._divided
        return self.module._parameters.get(self.attribute)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, also if the module computes it."""
        return tuple(
            (
                self._divided if self._divided is not None else getattr(self.module, self.attribute)
            ).shape
        )

    def has_gradient(self) -> bool:
        """Return whether a loss has reached the parameter.

        The gradient of an unused parameter may be zeros.
        """
        gradient = self.parameter.grad
        if gradient is None or self.shards is not None or not has_values(gradient):
            return gradient is not None
        return bool((gradient._values() if gradient.is_sparse else self.of(gradient)).any())

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of this view from a tensor in the shape of the parameter."""
        return tensor if self.rows is None else tensor[self.rows]

    def outline(self) -> Tensor:
        """Return the shape of these rows as a tensor without memory.

        This also works if the module computes the parameter.
        """
        return self.of(torch.empty(self.shape, device="meta"))


class Factor:
    """``A`` or ``G`` of one layer, as it was when it was bound."""

    def __init__(self, side: str, kind: Kind, weight: ParameterView, prefix: str) -> None:
        self.side, self._kind, self._weight, self._prefix = side, kind, weight, prefix
        # the owners of the blocks, if curvature is divided (divide_curvature)
        self.divided: Owners | None = None
        self.exchange: Processes | None = None  # with the other owners
        # the inverse for a step; while it is collected, if curvature is divided
        self.whole: Blocks | None = None

    # ---- where its blocks are --------------------------------------------------------------------

    @cached_property
    def of_rows(self) -> bool:
        """Whether it belongs to the rows of the weight."""
        return (
            self.side == ("A" if self._kind.transposed else "G")
            and why_not_by_rows(self._kind, self._weight.shape) is None
        )

    def bind(self) -> None:
        """Find where its blocks are.

        This is done anew after a change of the weight's options and shards, or of ``divided``.
        """
        shards, rows = self._weight.shards, self._weight.rows
        # whether its tensors have the rows of the weight
        self.by_rows = self.of_rows and self.divided is None
        # the owners, if every process keeps some blocks alone
        self.cut, self.owners = self.cut_now(), self.divided
        if shards is not None and self.by_rows:
            self.owners = Owners.of_shards(self.cut, shards, rows)
        # where the rows are cut that this process holds
        self.held = (
            self.cut
            if self.owners is None
            else self.cut.held(self.owners.bounds, self.owners.source)
        )
        key = ("" if self.by_rows else self._prefix) + self.side
        self.keys = key, key + "_inverse"  # in the state of the weight

    def cut_now(self) -> Cut:
        """Return where the rows of all processes are cut for the present ``split_dim``.

        The latter may have been changed.
        """
        kind, shards = self._kind, self._weight.shards
        rows = kind.inputs if self.side == "A" else kind.outputs
        split = self._weight.options.get("split_dim")
        if self.side == "A" and kind.diagonal_input:
            split = 1
        # the next step refuses it, and not the forward pass before that
        elif not isinstance(split, int) or split < 1:
            split = None
        if shards is not None and self.of_rows:
            return Cut.of(rows, split, edges=bounds_within(shards.bounds, self._weight.rows))
        return Cut.of(rows, split, kind.groups)

    @property
    def width(self) -> int:
        """The number of columns of its tensors.

        It is the same for all layers that are rows of one weight.
        """
        longest, split_dim = self._weight.longest, self._weight.options.get("split_dim")
        # not as the cut has it: the blocks of all shards may have one row, and not those of a later
        # division
        if not self.by_rows or (self.side == "A" and self._kind.diagonal_input):
            return self.cut.width
        return longest if split_dim is None else min(split_dim, longest)

    # ---- its tensors -----------------------------------------------------------------------------

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of its tensors, those of all processes if the weight is divided."""
        rows = self._weight.shape[0] if self.by_rows else self.held.rows
        return dict.fromkeys(self.keys, (rows, self.width))

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
        """Return this process's blocks of the factor or of its inverse, as views of the state."""
        rows = self._weight.state[self.keys[inverse]]
        rows = rows if type(rows) is Tensor else local(rows)
        if self.by_rows and self._weight.local_rows is not None:
            rows = rows[self._weight.local_rows]
        return Blocks(self.held, rows)

    def spread(self, *, inverse: bool) -> Blocks:
        """Return the blocks of all rows, with zeros for those of other processes.

        Other processes keep them with ``divide_curvature``.
        """
        own, owners = self.read(inverse=inverse), self.owners
        assert owners is not None
        whole, parts = (
            Blocks(self.cut, own.rows.new_zeros(self.cut.rows, self.cut.width)),
            iter(own.parts),
        )
        for i, part in enumerate(whole.parts):
            held = owners.held(i)
            if held.start < held.stop:
                part[held] = next(parts)
        return whole

    def dense(self, *, inverse: bool) -> list[Tensor]:
        """Return the matrix of each group, with zeros outside of the blocks.

        All processes that divide it must call this.
        """
        if self.divided is not None:
            return collected([self], inverse=inverse)[0].dense()
        stored: Any = self._weight.state[self.keys[inverse]]
        if self.owners is None:
            return self.read(inverse=inverse).dense()
        return Blocks(self.cut, self._weight.of(stored.full_tensor())).dense()


def collected(factors: Sequence[Factor], *, inverse: bool) -> list[Blocks]:
    """Collect divided factors, or their inverses, from all processes, which must all call it."""
    found = [factor.spread(inverse=inverse) for factor in factors]
    parts = [part for whole in found for part in whole.parts]
    exchange = next((factor.exchange for factor in factors), None)
    if exchange is not None:
        exchange.share_(
            parts,
            [bounds for factor in factors for bounds in (factor.owners or Owners((), 0)).bounds],
        )
    return found


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    to_local = None if type(tensor) is Tensor else getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    found: Tensor = to_local()
    return found
