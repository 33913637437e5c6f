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
    """The place of a layer that a composite module computes.

    Args:
        module: the composite module.
        name: the layer's name inside it.
        hook: makes the hook on the module, which reports the calls of all layers inside it.
    """

    module: nn.Module
    name: str
    hook: Callable[[Any], CompositeHook]


@dataclass
class Layer:
    """A layer that can be preconditioned.

    Args:
        name: its name: that of its module, or of the composite module with its name inside that.
        kind: its kind.
        weight: its weight.
        biases: its biases.
        prefix: put before the names of its state, where several layers are rows of one parameter.
        modules: the modules whose calls give its rows, each with its own kind; none for a layer inside a composite
            module. Several modules may share a weight.
        inside: its place in a composite module; None for a layer that consists of modules.
    """

    name: str
    kind: Kind
    weight: ParameterView
    biases: list[ParameterView] = field(default_factory=list)
    prefix: str = ""
    modules: list[tuple[nn.Module, Kind]] = field(default_factory=list)
    inside: Inside | None = None

    @property
    def module(self) -> nn.Module:
        """The module that owns the weight."""
        return self.weight.module
