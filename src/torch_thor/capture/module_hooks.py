"""The hooks on modules: for which layers the input and output of a module's call are reported.

A module that is one layer reports its own input and output (:class:`CalledModuleHook`). A composite module computes
several layers without calling a module for any of them; its hook is registered with it
(:mod:`torch_thor.capture.composites`). When the hooks are called is decided in :mod:`torch_thor.capture.module_calls`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torch_thor.capture.composites import CompositeHook
from torch_thor.capture.layers import Layer
from torch_thor.capture.watcher import ModuleHook, Watcher, first_argument
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature

__all__ = ["CalledModuleHook", "ModuleHook", "Watcher", "hooks_of"]


class CalledModuleHook(ModuleHook):
    """The hook on a module that is one layer: the rows are those of its own input and output."""

    def __init__(self, module: nn.Module, kind: Kind, layer: LayerCurvature) -> None:
        self.module = module
        self.layers = [layer]
        self.kind = kind

    def leave(self, subscriber: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Report the input and the output of the module."""
        x = args[0] if args else first_argument(self.module, args, kwargs)
        if isinstance(x, Tensor):
            subscriber.watch(self.layers[0], self.kind, x, output)


def hooks_of(found: Mapping[str, Layer], layers: Mapping[str, LayerCurvature]) -> list[ModuleHook]:
    """Make the hooks on the modules whose calls give rows to layers."""
    hooks: list[ModuleHook] = []
    composite: dict[int, CompositeHook] = {}
    for name, layer in found.items():
        hooks += [CalledModuleHook(module, kind, layers[name]) for module, kind in layer.modules]
        if layer.inside is not None:
            key = id(layer.inside.module)
            if key not in composite:
                composite[key] = layer.inside.hook(layer.inside.module)
            composite[key].add(layer.inside.name, layers[name])
    return [*hooks, *composite.values()]
