"""What an update rule is: how weights move once the curvature stands."""

from typing import Any, Protocol

from torch import Tensor

from torch_thor.optim.parameters import Group, States
from torch_thor.optim.thor.parameter_index import ParameterIndex


class UpdateRule(Protocol):
    """From gradients to weights, for all parameters.

    ``sides`` are the factors that it needs of each layer, ``("A", "G")`` or ``("A",)``; ``relative_damping`` says that
    λ is relative to the mean diagonal of the factors, in the place of ``√(λ/T)``.
    """

    sides: tuple[str, ...]
    relative_damping: bool

    def make_state(self, index: ParameterIndex, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        """Add the entries that a parameter's state lacks.

        Args:
            index: which layer preconditions which parameter.
            parameter: one of the group's.
            state: its state; changed in place.
            group: its parameter group.
        """
        ...

    def update(self, groups: list[Group], index: ParameterIndex, states: States, decaying: frozenset[int]) -> None:
        """Move every parameter that has a gradient.

        Args:
            groups: parameter groups.
            index: which layer preconditions which parameter.
            states: the optimizer's state.
            decaying: ``id`` of the parameters to which weight decay applies.
        """
        ...
