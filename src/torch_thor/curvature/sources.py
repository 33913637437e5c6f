"""The modules that rows come from, and the hooks on them.

A hook is there on refresh steps only. A copied or unpickled model may have been copied during one: what it gets in the
place of a hook does nothing, since the optimizer is not its own.
"""

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils.hooks import RemovableHandle

from torch_thor.curvature.attention import OpenAttention
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.survey import Layer


class Watcher(Protocol):
    """Who gathers the rows of a layer that has just run."""

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Take note of one call: the layer, the geometry of the module that ran, its input and its output."""
        ...


class Source(Protocol):
    """A module whose calls give rows to layers."""

    layers: list[LayerCurvature]
    handles: list[RemovableHandle]

    def attach(self, watcher: Watcher, wanted: bool) -> None:
        """Put the hooks on, or take them off."""
        ...

    def detach(self) -> None:
        """Take the hooks off."""
        ...

    def clean(self) -> None:
        """Take off what a copied model has in the place of hooks."""
        ...


def remove(handles: list[RemovableHandle]) -> None:
    """Take hooks off their module.

    Args:
        handles: theirs; emptied.
    """
    for handle in handles:
        handle.remove()
    handles.clear()


def inert_hook(*_: Any, **__: Any) -> None:
    """Do nothing: what a copied or unpickled model has in the place of a hook, whose optimizer is not its own."""


def _inert() -> Any:
    return inert_hook


class _Hook:
    """A callable that a copy of the model does not take along."""

    def __init__(self, watcher: Watcher, source: "_HookedSource") -> None:
        # weak, so that a model does not keep alive an optimizer that its user has dropped
        self._watcher = weakref.ref(watcher)
        self._source = weakref.ref(source)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return inert_hook

    def __reduce__(self) -> Any:
        return _inert, ()


class _HookedSource:
    """The common part: hooks that come and go.

    Args:
        module: the module.
        layers: the layers that get its rows.
    """

    def __init__(self, module: nn.Module, layers: list[LayerCurvature]) -> None:
        self.module = module
        self.layers = layers
        self.handles: list[RemovableHandle] = []  # emptied and filled, never replaced: see Capture's finalizer

    def attach(self, watcher: Watcher, wanted: bool) -> None:
        """Put the hooks on, or take them off.

        Args:
            watcher: who gathers the rows.
            wanted: whether rows are wanted.
        """
        if wanted and not self.handles:
            self.handles.extend(self._hooks(watcher))
        elif not wanted:
            self.detach()

    def detach(self) -> None:
        """Take the hooks off."""
        remove(self.handles)

    def clean(self) -> None:
        """Take off what a copied model has in the place of hooks."""
        module = self.module
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if hook is inert_hook]:
                del hooks[key]
                for flags in (
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                    module._forward_pre_hooks_with_kwargs,
                ):
                    flags.pop(key, None)

    def _hooks(self, watcher: Watcher) -> list[RemovableHandle]:
        raise NotImplementedError


class ModuleSource(_HookedSource):
    """A module that is a layer: its input and output are the rows.

    Args:
        module: the module.
        kind: its geometry.
        layer: the layer.
    """

    def __init__(self, module: nn.Module, kind: Kind, layer: LayerCurvature) -> None:
        super().__init__(module, [layer])
        self.kind = kind

    def _hooks(self, watcher: Watcher) -> list[RemovableHandle]:
        return [self.module.register_forward_hook(_ModuleHook(watcher, self), with_kwargs=True)]


class _ModuleHook(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # a layer that has been idle may be compiled with its hook
            return
        watcher, source = self._watcher(), self._source()
        if watcher is not None and isinstance(source, ModuleSource):
            watcher.watch(source.layers[0], source.kind, args[0] if args else kwargs["input"], output)


class AttentionSource(_HookedSource):
    """An ``nn.MultiheadAttention``: up to four layers, of which it calls none.

    Args:
        module: the module.
        layers: by projection, ``"q"``, ``"k"``, ``"v"`` and ``"out"``.
    """

    def __init__(self, module: nn.Module, layers: dict[str, LayerCurvature]) -> None:
        super().__init__(module, list(layers.values()))
        self.by_projection = layers
        self.open: list[OpenAttention] = []

    def _hooks(self, watcher: Watcher) -> list[RemovableHandle]:
        return [
            self.module.register_forward_pre_hook(_EnterAttention(watcher, self)),
            self.module.register_forward_hook(_LeaveAttention(watcher, self), with_kwargs=True, always_call=True),
        ]


class _EnterAttention(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watcher, source = self._watcher(), self._source()
        if watcher is None or not isinstance(source, AttentionSource) or not torch.is_grad_enabled():
            return
        if not any(layer.armed for layer in source.layers):  # loss terms are counted without opening: same bits
            return
        while source.open:  # Ctrl-C inside its forward: torch runs no hook then, and the mode is still there
            stale = source.open.pop()
            if _get_current_function_mode() is stale:
                stale.__exit__(None, None, None)

        def watch(projection: str, x: Tensor, y: Tensor) -> None:
            layer = source.by_projection.get(projection)
            if layer is not None:
                watcher.watch(layer, layer.kind, x, y)

        mode = OpenAttention(watch)
        mode.__enter__()  # type: ignore[no-untyped-call]
        source.open.append(mode)


class _LeaveAttention(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watcher, source = self._watcher(), self._source()
        # grad mode may not change in between: enter and leave see the same
        if not isinstance(source, AttentionSource) or not torch.is_grad_enabled():
            return
        if source.open:
            source.open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        elif watcher is not None and output is not None:  # None: its forward raised
            query = args[0] if args else kwargs["query"]
            batch_first = query if module.batch_first or query.dim() < 3 else query.transpose(0, 1)
            for layer in source.layers:
                watcher.watch(layer, layer.kind, batch_first, output[0])


def sources_of(found: Mapping[str, Layer], layers: Mapping[str, LayerCurvature]) -> list[Source]:
    """Return where the rows of layers come from.

    Args:
        found: what the survey found of each layer.
        layers: their curvature, by the same names.

    Returns:
        One source a module.
    """
    sources: list[Source] = []
    attentions: dict[int, tuple[nn.Module, dict[str, LayerCurvature]]] = {}
    for name, layer in found.items():
        sources += [ModuleSource(module, kind, layers[name]) for module, kind in layer.modules]
        if layer.attention is not None:
            module, projection = layer.attention
            attentions.setdefault(id(module), (module, {}))[1][projection] = layers[name]
    return sources + [AttentionSource(module, by_projection) for module, by_projection in attentions.values()]
