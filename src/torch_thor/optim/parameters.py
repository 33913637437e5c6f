"""Which parameter is which: names, groups and layers, looked up by today's parameter objects.

Wrappers such as FSDP2 and Accelerate put new parameter objects into modules and groups after the optimizer was made,
so nothing here outlives a step: names hold, identities do not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from torch_thor.curvature.layer import LayerCurvature

Group = dict[str, Any]


class ParameterIndex:
    """Names and roles of a model's parameters.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = {name: model.get_submodule(name.rpartition(".")[0]) for name, _ in model.named_parameters()}
        self._names: dict[int, str] = {}
        self._groups: dict[int, Group] = {}
        self._roles: dict[str, tuple[LayerCurvature, bool]] = {}

    def set_layers(self, layers: Mapping[str, LayerCurvature]) -> None:
        """Say which layers are preconditioned.

        Args:
            layers: by module name.
        """
        self._roles = {
            f"{name}.{role}".lstrip("."): (layer, role == "weight")
            for name, layer in layers.items()
            for role in ("weight", "bias")
        }

    def update(self, groups: list[Group]) -> None:
        """Look up today's parameter objects.

        Args:
            groups: the optimizer's parameter groups.
        """
        self._names = {}
        for name, module in self._owners.items():
            parameter = module._parameters.get(name.rpartition(".")[2])
            if parameter is not None:
                self._names[id(parameter)] = name
        self._groups = {id(p): group for group in groups for p in group["params"]}

    def name(self, parameter: Tensor) -> str:
        """Return a parameter's name in the model.

        Args:
            parameter: one of today's parameters.

        Returns:
            The name; a description where the model has replaced the parameter by another.
        """
        return self._names.get(id(parameter), f"<parameter of shape {tuple(parameter.shape)}>")

    def knows(self, parameter: Tensor) -> bool:
        """Return whether a parameter stands in a group.

        Args:
            parameter: any tensor.

        Returns:
            Whether :meth:`group` will find it.
        """
        return id(parameter) in self._groups

    def group(self, parameter: Tensor) -> Group:
        """Return a parameter's group.

        Args:
            parameter: one of today's parameters.

        Returns:
            The group.

        Raises:
            RuntimeError: it stands in none: a module's parameter was replaced behind the optimizer's back.
        """
        if id(parameter) not in self._groups:
            raise RuntimeError(
                f"parameter {self.name(parameter)!r} is in none of the optimizer's parameter groups: it was replaced "
                f"after THOR was made; make THOR after that, or assign to parameter.data instead"
            )
        return self._groups[id(parameter)]

    def role(self, parameter: Tensor) -> tuple[LayerCurvature | None, bool]:
        """Return the layer that preconditions a parameter.

        Args:
            parameter: one of today's parameters.

        Returns:
            The layer (None for a plain parameter) and whether the parameter is its weight.
        """
        return self._roles.get(self.name(parameter), (None, False))


def with_gradient(groups: list[Group]) -> Iterator[tuple[Group, nn.Parameter, Tensor]]:
    """Iterate over the parameters that got a gradient this step.

    Args:
        groups: the optimizer's parameter groups.

    Yields:
        Group, parameter, gradient.
    """
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, parameter.grad
