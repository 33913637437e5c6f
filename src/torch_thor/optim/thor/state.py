"""What is kept of each parameter from step to step, and when it is made."""

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.optim.parameters import Group, ParameterIndex
from torch_thor.optim.thor.gradient_checks import largest_gradient
from torch_thor.optim.thor.scale_free import complete_state


class KeptState:
    """The optimizer's state of today's parameters.

    Args:
        state: from parameters to their entries; makes missing ones.
        groups: the optimizer's parameter groups.
        index: knows which layers precondition a parameter.
        scaling: None or ``"spectral"``.
    """

    def __init__(
        self, state: MutableMapping[Tensor, dict[str, Any]], groups: list[Group], index: ParameterIndex, scaling: Any
    ) -> None:
        self._state, self._groups, self._index, self._scaling = state, groups, index, scaling

    def momentum_buffer(self, parameter: Tensor) -> Tensor:
        """Return a parameter's momentum, made where there is none.

        Args:
            parameter: one of the groups'.

        Returns:
            Of its shape, in the factors' dtype.
        """
        state = self._state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=factor_dtype(parameter.dtype))
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def scale_free(self, parameter: Tensor) -> dict[str, Any]:
        """Return what the scale-free step keeps of a parameter, made where there is none.

        Args:
            parameter: one of the groups'.

        Returns:
            Its state.
        """
        state = self._state[parameter]
        complete_state(self._index, parameter, state)
        return state

    def is_asked_for(self) -> bool:
        """Return whether torch.distributed.checkpoint asks for the state, by a first step in which nothing moves.

        That is no step of training, and maybe not every process takes it.

        Returns:
            Whether there is no state yet, lr is 0 and every gradient is.
        """
        still = not self._state and not any(float(group["lr"]) for group in self._groups)
        return still and largest_gradient(self._groups, self._index) == 0

    def materialise(self, layers: Iterable[LayerCurvature]) -> None:
        """Make all state that there is not yet, at the first step and where parameters have come.

        So that a checkpoint has the same keys on every rank and at every time; not at construction, because wrappers
        that replace parameters would leave it under keys that are gone. Frozen parameters have none.

        Args:
            layers: the preconditioned layers.
        """
        for group in self._groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                # a number for each: torch.distributed.checkpoint takes a parameter without any for one that is lost
                self._state[parameter].setdefault("preconditioned", int(bool(self._index.shares(parameter))))
                if self._scaling == "spectral":
                    self.scale_free(parameter)
                elif group["momentum"]:
                    self.momentum_buffer(parameter)
        for layer in layers:
            layer.materialise()
