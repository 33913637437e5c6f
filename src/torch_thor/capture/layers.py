"""What inspecting a model finds: parameters' owners, and layers that can be preconditioned."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_thor.capture.hooks import ModuleHook
from torch_thor.curvature.kinds import parameter_names_of
from torch_thor.curvature.layer import Layer, LayerCurvature


@dataclass(frozen=True)
class Owner:
    """One place of a parameter in a model; a shared parameter has several."""

    module_name: str  # the name of the module that holds the parameter
    attribute: str  # the parameter's name in it
    module: nn.Module  # the module

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.module_name}.{self.attribute}".lstrip(".")

    @property
    def is_weight(self) -> bool:
        """Whether the parameter has the name of the module's weight."""
        return self.attribute == parameter_names_of(self.module)[0]

    @property
    def bias(self) -> str:
        """The name of the module's bias."""
        return parameter_names_of(self.module)[1]


def owners_of(model: nn.Module) -> Mapping[int, Sequence[Owner]]:
    """Find the owners of all parameters, by their `id`."""
    owners: defaultdict[int, list[Owner]] = defaultdict(list)
    for module_name, module in model.named_modules():
        # modules may override named_parameters()
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append(Owner(module_name, attribute, module))
    return dict(owners)


@dataclass(frozen=True)
class Use:
    """A module that computes a layer, and so has its rows."""

    module: nn.Module
    name: str  # the layer's name inside the module; empty if the module is the layer
    hook: Callable[[Any], ModuleHook]  # makes the hook on the module


def hooks_of(
    layers: Mapping[str, Layer], curvature: Mapping[str, LayerCurvature]
) -> list[ModuleHook]:
    """Make the hooks on the modules whose calls give rows to layers, one for each module."""
    hooks: dict[int, ModuleHook] = {}
    for name, layer in layers.items():
        for use in layer.uses:
            if id(use.module) not in hooks:
                hooks[id(use.module)] = use.hook(use.module)
            hooks[id(use.module)].by_name[use.name] = curvature[name]
    return list(hooks.values())
