"""A view of a parameter or of some of its rows, and what an optimizer has of it."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import has_values
from torch_thor.curvature.shards import RowShards

State = MutableMapping[str, Any]


@dataclass(frozen=True, eq=False)
class ParameterView:
    """A parameter of a module, or rows of one.

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
        if self.divided is not None:
            return self.divided
        return self.module._parameters.get(self.attribute)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, also if the module computes it."""
        found = getattr(self.module, self.attribute) if self.divided is None else self.divided
        return tuple(found.shape)

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
