"""The interface of update rules, which change the weights by the gradients and the current curvature."""

from typing import Any, Protocol

from torch import Tensor

from torch_thor.optim.divided_curvature import DividedInverses
from torch_thor.optim.parameter_index import ParameterIndex
from torch_thor.optim.parameters import Group, States


class UpdateRule(Protocol):
    """Updates all parameters in one step."""

    sides: tuple[str, ...]
    relative_damping: bool

    def make_state(self, index: ParameterIndex, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        """Add the entries that the state of a parameter lacks."""
        ...

    def update(
        self,
        groups: list[Group],
        index: ParameterIndex,
        states: States,
        decaying: frozenset[int],
        inverses: DividedInverses | None,
    ) -> None:
        """Update every parameter that has a gradient."""
        ...
