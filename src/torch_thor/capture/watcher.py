"""The two sides of a hook on a module: the hook, and the watcher to which it reports the calls of layers."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from torch_thor.capture.module_calls import CallHandler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature


class Watcher(Protocol):
    """Receives the input and output of each call of a layer."""

    def gathers(self, layer: LayerCurvature) -> bool:
        """Return whether the statistics of a layer are gathered in this step."""
        ...

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Receive one call: the layer, the kind that the rows of this call are read with, its input and its output."""
        ...


class ModuleHook(CallHandler):
    """A hook on one module, whose calls give rows to one or more layers."""

    layers: list[LayerCurvature]


def first_argument(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call of a module, also where it was passed by name."""
    if args:
        return args[0]
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return kwargs.get(names[0]) if names else None
