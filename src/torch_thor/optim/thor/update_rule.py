"""The interface of update rules, which change the weights by the gradients and the current curvature."""

from typing import Any, Protocol

from torch import Tensor

from torch_thor.optim.parameters import Group, States
from torch_thor.optim.thor.divided_curvature import DividedInverses
from torch_thor.optim.thor.parameter_index import ParameterIndex


class UpdateRule(Protocol):
    """Updates all parameters in one step.

    ``sides`` are the factors that the rule needs of each layer, ``("A", "G")`` or ``("A",)``. ``relative_damping`` is
    True if λ is relative to the mean diagonal of each factor, and False if ``√(λ/T)`` is added to the diagonals.
    """

    sides: tuple[str, ...]
    relative_damping: bool

    def make_state(self, index: ParameterIndex, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        """Add the entries that the state of a parameter lacks.

        Args:
            index: the index of the parameters, which knows the layers of each.
            parameter: the parameter.
            state: the state of the parameter; changed in place.
            group: the parameter's group.
        """
        ...

    def update(
        self,
        groups: list[Group],
        index: ParameterIndex,
        states: States,
        decaying: frozenset[int],
        inverses: DividedInverses | None,
    ) -> None:
        """Update every parameter that has a gradient.

        Args:
            groups: the optimizer's parameter groups.
            index: the index of the parameters, which knows the layers of each.
            states: the optimizer's state.
            decaying: the ``id`` of each parameter to which weight decay applies.
            inverses: collects the inverses of the layers from other processes; None if all are here.
        """
        ...
