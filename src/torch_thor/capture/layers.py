"""What inspecting a model finds: parameters' owners, and layers that can be preconditioned."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_thor.capture.composites import CompositeHook
from torch_thor.curvature.kinds import parameter_names_of


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
class Inside:
    """The place of a layer that a composite module computes."""

    module: nn.Module  # the composite module
    name: str  # the layer's name inside it
    hook: Callable[[Any], CompositeHook]
