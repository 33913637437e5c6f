"""A view of a parameter or of some of its rows, and how processes divide the rows (FSDP2)."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

State = MutableMapping[str, Any]


@dataclass(frozen=True)
class RowShards:
    """How the rows of a parameter are divided among the processes that train together."""

    count: int  # the number of shards
    bounds: tuple[int, ...]  # process r owns the rows from bounds[r] to bounds[r + 1]
    local: slice = field(compare=False)  # the rows that this process holds
    source: int = field(compare=False)  # the process that inverts the blocks of these rows
    # makes a DTensor of the own rows
    wrap: Callable[[Tensor], Tensor] = field(repr=False, compare=False)
    has_replicas: bool = False  # whether other processes hold the same rows

    def own_of(self, rows: slice | None) -> slice:
        """Return those of some rows that this process holds, counted from its first row."""
        first, last = self.local.start, self.local.stop
        if rows is not None:
            first, last = max(first, rows.start), min(last, rows.stop)
        return (
            slice(first - self.local.start, last - self.local.start)
            if first < last
            else slice(0, 0)
        )


def bounds_within(bounds: tuple[int, ...], rows: slice | None) -> tuple[int, ...]:
    """Return how some rows are divided, counted from the first of them."""
    if rows is None:
        return bounds
    return tuple(min(max(bound, rows.start), rows.stop) - rows.start for bound in bounds)


def shard_bounds(rows: int, shards: int) -> tuple[int, ...]:
    """Return the first row of each shard, and the number of rows.

    ``torch.chunk`` and FSDP2 divide them in this way.
    """
    each = -(-rows // shards)
    return tuple(min(i * each, rows) for i in range(shards + 1))


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    to_local = None if type(tensor) is Tensor else getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


@dataclass(frozen=True, eq=False)
class ParameterView:
    """A parameter of a module, or rows of it.

    The parameter is looked up in the module each time, because wrappers replace it. A view that is
    bound to an optimizer is another value (``dataclasses.replace``).
    """

    module: nn.Module
    attribute: str
    rows: slice | None = None
    # of the optimizer: the state of the parameter and its group; empty while there is none
    state: State = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    # how its rows are divided, and the parameter, which FSDP2 replaces while modules run; None if
    # every process holds all rows
    shards: RowShards | None = None
    divided: nn.Parameter | None = None
    most_rows: int = 0  # the largest number of rows of the layers that are rows of this parameter

    @cached_property
    def local_rows(self) -> slice | None:
        """``rows`` in the part of the parameter that this process holds."""
        if self.shards is None or self.rows is None:
            return self.rows
        return self.shards.own_of(self.rows)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter with all its rows."""
        parameter = self.present
        if parameter is None:
            parameter = getattr(self.module, self.attribute)  # where the module defines the lookup
        if not isinstance(parameter, nn.Parameter):
            raise RuntimeError(
                f"{self.attribute!r} of {self.module} is no parameter any more: it was pruned or "
                "parametrised after the optimizer was made, and is computed from other "
                "parameters. The next step trains those plainly"
            )
        return parameter

    @property
    def present(self) -> nn.Parameter | None:
        """The parameter that is trained.

        It is None if the module has none, or computes it from others (pruning).
        """
        return self.module._parameters.get(self.attribute) if self.divided is None else self.divided

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter with all its rows, also if the module computes it."""
        tensor = getattr(self.module, self.attribute) if self.divided is None else self.divided
        return tuple(tensor.shape)

    def has_gradient(self) -> bool | Tensor:
        """Return whether a loss has reached the parameter, as a number on the device if need be.

        The gradient of an unused parameter may be zeros.
        """
        gradient = self.parameter.grad
        if gradient is None or self.shards is not None:
            return gradient is not None
        return (gradient._values() if gradient.is_sparse else self.of(gradient)).any()

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of this view from a tensor in the shape of the parameter."""
        return tensor if self.rows is None else tensor[self.rows]

    def outline(self) -> Tensor:
        """Return the shape of these rows as a tensor without memory.

        This also works if the module computes the parameter.
        """
        return self.of(torch.empty(self.shape, device="meta"))
