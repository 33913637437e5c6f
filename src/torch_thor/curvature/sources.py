"""The modules that rows come from, and what is heard of their calls (:mod:`torch_thor.curvature.calls`)."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from torch_thor.curvature.attention import OpenAttention
from torch_thor.curvature.calls import Listener
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.survey import Layer


class Watcher(Protocol):
    """Who gathers the rows of a layer that has just run."""

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Take note of one call: the layer, the geometry of the module that ran, its input and its output."""
        ...


class Source(Listener, Protocol):
    """A module whose calls give rows to layers."""

    layers: list[LayerCurvature]


class ModuleSource:
    """A module that is a layer: its input and output are the rows.

    Args:
        module: the module.
        kind: its geometry.
        layer: the layer.
    """

    def __init__(self, module: nn.Module, kind: Kind, layer: LayerCurvature) -> None:
        self.module = module
        self.layers = [layer]
        self.kind = kind

    def enter(self, hearer: Watcher, args: Any) -> None:
        """Do nothing.

        Args:
            hearer: who gathers the rows.
            args: the module's arguments.
        """

    def leave(self, hearer: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Hand over input and output.

        Args:
            hearer: who gathers the rows.
            args: the module's arguments.
            kwargs: those by name.
            output: its output.
        """
        hearer.watch(self.layers[0], self.kind, args[0] if args else kwargs["input"], output)

    def abandon(self) -> None:
        """Do nothing."""


class AttentionSource:
    """An ``nn.MultiheadAttention``: up to four layers, of which it calls none.

    Args:
        module: the module.
        layers: by projection, ``"q"``, ``"k"``, ``"v"`` and ``"out"``.
    """

    def __init__(self, module: nn.MultiheadAttention, layers: dict[str, LayerCurvature]) -> None:
        self.module: nn.Module = module
        self.layers = list(layers.values())
        self._by_projection = layers
        self._open: list[OpenAttention] = []

    def enter(self, hearer: Watcher, args: Any) -> None:
        """Take the projections out of the attention function, on a step that wants their rows.

        Args:
            hearer: who gathers the rows.
            args: the module's arguments.
        """
        if not torch.is_grad_enabled():
            return
        if not any(layer.armed for layer in self.layers):  # loss terms are counted without opening: same bits
            return
        while self._open:  # Ctrl-C inside its forward: torch runs no hook then, and the mode is still there
            stale = self._open.pop()
            if _get_current_function_mode() is stale:
                stale.__exit__(None, None, None)

        def watch(projection: str, x: Tensor, y: Tensor) -> None:
            layer = self._by_projection.get(projection)
            if layer is not None:
                hearer.watch(layer, layer.kind, x, y)

        mode = OpenAttention(watch)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(mode)

    def leave(self, hearer: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Close what was opened; where nothing was, let the loss terms be counted.

        Args:
            hearer: who gathers the rows.
            args: the module's arguments.
            kwargs: those by name.
            output: its output.
        """
        # grad mode may not change in between: enter and leave see the same
        if not torch.is_grad_enabled():
            return
        if self._open:
            self.abandon()
            return
        query = args[0] if args else kwargs["query"]
        batch_first = query if self.module.batch_first or query.dim() < 3 else query.transpose(0, 1)
        for layer in self.layers:
            hearer.watch(layer, layer.kind, batch_first, output[0])

    def abandon(self) -> None:
        """Close what was opened."""
        if self._open:
            self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


def sources_of(found: Mapping[str, Layer], layers: Mapping[str, LayerCurvature]) -> list[Source]:
    """Return where the rows of layers come from.

    Args:
        found: what the survey found of each layer.
        layers: their curvature, by the same names.

    Returns:
        One source a module.
    """
    sources: list[Source] = []
    attentions: dict[int, tuple[nn.MultiheadAttention, dict[str, LayerCurvature]]] = {}
    for name, layer in found.items():
        sources += [ModuleSource(module, kind, layers[name]) for module, kind in layer.modules]
        if layer.attention is not None:
            module, projection = layer.attention
            attentions.setdefault(id(module), (module, {}))[1][projection] = layers[name]
    return sources + [AttentionSource(module, by_projection) for module, by_projection in attentions.values()]
