"""The hooks on modules: for which layers the input and output of a module's call are reported.

A module that is one layer reports its own input and output (:class:`CalledModuleHook`). A composite module computes
several layers without calling a module for any of them; its hook is registered with it
(:mod:`torch_thor.capture.composites`). When the hooks are called is decided in :mod:`torch_thor.capture.module_calls`.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torch_thor.capture.composites import CompositeHook
from torch_thor.capture.composites.hook import Watcher
from torch_thor.capture.layers import Layer
from torch_thor.capture.module_calls import CallHandler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature


class CalledModuleHook(CallHandler):
    """The hook on a module that is one layer: the rows are those of its own input and output."""

    def __init__(self, module: nn.Module, kind: Kind, layer: LayerCurvature) -> None:
        self.module = module
        self.layers = [layer]
        self.kind = kind

    def leave(self, subscriber: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Report the first argument, also where it was passed by name, and the output of the module."""
        if not args:
            names = list(inspect.signature(type(self.module).forward).parameters)[1:2]
            args = [kwargs.get(name) for name in names]
        if args and isinstance(args[0], Tensor):
            subscriber.watch(self.layers[0], self.kind, args[0], output)


ModuleHook = CalledModuleHook | CompositeHook


def hooks_of(found: Mapping[str, Layer], layers: Mapping[str, LayerCurvature]) -> list[ModuleHook]:
    """Make the hooks on the modules whose calls give rows to layers."""
    hooks: list[ModuleHook] = []
    composite: dict[int, CompositeHook] = {}
    for name, layer in found.items():
        hooks += [CalledModuleHook(module, kind, layers[name]) for module, kind in layer.modules]
        if layer.inside is not None:
            module = layer.inside.module
            hook = composite.get(id(module)) or composite.setdefault(id(module), layer.inside.hook(module))
            hook.by_name[layer.inside.name] = layers[name]
    return [*hooks, *composite.values()]
