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

    # The parameter is looked up in the module each time, because wrappers replace it. The optimizer binds the view to
    # the state and the options (`bind`) whenever one of them is created, loaded or replaced, so that a step does not
    # have to look them up. The rows of a parameter may be divided among processes (FSDP2); its state then has the rows
    # that this process holds.

    def __init__(self, module: nn.Module, attribute: str, rows: slice | None = None) -> None:
        self.module = module
        self.attribute = attribute
        self.rows = rows
        self.entries: State | None = None  # the optimizer's state of the parameter; None while there is none
        self.options: Mapping[str, Any] = {}  # the parameter's group; empty while there is none
        self.shards: RowShards | None = None  # how its rows are divided; None if every process holds all of them
        self.local_rows = rows  # ``rows`` in the part of the parameter that this process holds
        self._divided: nn.Parameter | None = None  # the parameter, if its rows are divided
        self._longest: int | None = None

    def bind(
        self,
        state: State | None,
        options: Mapping[str, Any],
        parameter: nn.Parameter | None = None,
        shards: RowShards | None = None,
    ) -> None:
        """Bind the view to the optimizer's state of the parameter and to the options of its group."""
        self.entries, self.options = state, options
        self.shards, self.local_rows = shards, self.rows
        self._divided = None if shards is None else parameter
        if shards is not None and self.rows is not None:
            self.local_rows = shards.own_of(self.rows)

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
        if self._divided is not None:  # while modules run, FSDP2 replaces it by the whole parameter
            return self._divided
        parameter = getattr(self.module, self.attribute)
        if not isinstance(parameter, nn.Parameter):
            raise RuntimeError(
                f"{self.attribute!r} of {self.module} is no parameter any more: it was pruned or parametrised after "
                f"THOR was made, and is computed from other parameters. The next step trains those plainly"
            )
        return parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, also if the module computes it."""
        whole = self._divided if self._divided is not None else getattr(self.module, self.attribute)
        return tuple(whole.shape)

    @property
    def longest(self) -> int:
        """The largest number of rows of the layers that are rows of this parameter."""
        if self._longest is not None:
            return self._longest
        return self.shape[0] if self.rows is None else self.rows.stop - self.rows.start

    @longest.setter
    def longest(self, rows: int) -> None:
        self._longest = rows

    @property
    def present(self) -> nn.Parameter | None:
        """The parameter that is trained; None if the module has none, or computes it from others (pruning)."""
        return self.module._parameters.get(self.attribute) if self._divided is None else self._divided

    @property
    def is_there(self) -> bool:
        """Whether the module has the parameter, and does not compute it from other parameters (pruning)."""
        return self.module._parameters.get(self.attribute) is not None

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
        whole = torch.empty(getattr(self.module, self.attribute).shape, device="meta")
        return self.of(whole)

    def is_same_as(self, other: "ParameterView") -> bool:
        """Return whether another view is of the same rows of the same parameter of the same module."""
        return self.module is other.module and (self.attribute, self.rows) == (other.attribute, other.rows)
