"""The view through which a layer accesses its parameter, the gradient, and the optimizer's state of the parameter.

A view is of a whole parameter, or of some of its rows (a projection inside a fused weight). No other module of
:mod:`torch_thor.curvature` distinguishes between the two.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.shards import RowShards

State = MutableMapping[str, Any]


class ParameterView:
    """A parameter of a module, or rows of one."""

    # The parameter is looked up in the module each time, because wrappers replace it. The plan binds the view to the
    # optimizer's state and options. The rows of a parameter may be divided among processes (FSDP2); its state then has
    # the rows that this process holds.

    def __init__(self, module: nn.Module, attribute: str, rows: slice | None = None) -> None:
        self.module, self.attribute, self.rows = module, attribute, rows
        self.entries: State | None = None  # the optimizer's state of the parameter; None while there is none
        self.options: Mapping[str, Any] = {}  # the parameter's group; empty while there is none
        self.shards: RowShards | None = None  # how its rows are divided; None if every process holds all of them
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
        """Bind the view to the optimizer's state of the parameter and to the options of its group."""
        self.entries, self.options, self.shards = state, options, shards
        self._divided = None if shards is None else parameter
        self.local_rows = self.rows if shards is None or self.rows is None else shards.own_of(self.rows)

    @property
    def split_dim(self) -> int | None:
        """The block size of the factors, from the parameter's group; None for factors that are not split."""
        split_dim: Any = self.options.get("split_dim")
        # None too for a value that the next step refuses, so that the forward pass before that does not fail
        return split_dim if isinstance(split_dim, int) and split_dim >= 1 else None

    @property
    def state(self) -> State:
        """The optimizer's entries for the parameter; a new empty mapping if there are none."""
        return {} if self.entries is None else self.entries

    @property
    def parameter(self) -> nn.Parameter:
        """The whole parameter."""
        found = self.present
        if found is None:
            found = getattr(self.module, self.attribute)  # a lookup that the module defines itself
        if not isinstance(found, nn.Parameter):
            raise RuntimeError(
                f"{self.attribute!r} of {self.module} is no parameter any more: it was pruned or parametrised after "
                f"the optimizer was made, and is computed from other parameters. The next step trains those plainly"
            )
        return found

    @property
    def present(self) -> nn.Parameter | None:
        """The parameter that is trained; None if the module has none, or computes it from others (pruning)."""
        if self._divided is not None:  # while modules run, FSDP2 replaces it by the whole parameter
            return self._divided
        return self.module._parameters.get(self.attribute)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, also if the module computes it."""
        return tuple((self._divided if self._divided is not None else getattr(self.module, self.attribute)).shape)

    def has_gradient(self) -> bool:
        """Return whether a loss has reached the parameter. The gradient of an unused parameter may be zeros."""
        gradient = self.parameter.grad
        if gradient is None or self.shards is not None:
            return gradient is not None
        return bool((gradient._values() if gradient.is_sparse else self.of(gradient)).any())

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of this view from a tensor in the shape of the parameter."""
        return tensor if self.rows is None else tensor[self.rows]

    def outline(self) -> Tensor:
        """Return the shape of these rows as a tensor without memory, also if the module computes the parameter."""
        return self.of(torch.empty(self.shape, device="meta"))
