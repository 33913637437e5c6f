"""The layers of a model that can be preconditioned, as the inspection of the model describes them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torch_thor.capture.composites import CompositeHook
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.parameter_view import ParameterView


@dataclass(frozen=True)
class Inside:
    """The place of a layer that a composite module computes."""

    module: nn.Module  # the composite module
    name: str  # the layer's name inside it
    hook: Callable[[Any], CompositeHook]


@dataclass
class Layer:
    """A layer that can be preconditioned."""

    name: str  # its name: that of its module, or of the composite module with its name inside that
    kind: Kind  # its kind
    weight: ParameterView  # its weight
    biases: list[ParameterView] = field(default_factory=list)  # its biases
    prefix: str = ""  # put before the names of its state, where several layers are rows of one parameter
    modules: list[tuple[nn.Module, Kind]] = field(default_factory=list)
    inside: Inside | None = None  # its place in a composite module; None for a layer that consists of modules

    @property
    def module(self) -> nn.Module:
        """The module that owns the weight."""
        return self.weight.module
