"""The hook on a composite module: while its forward runs, a function mode reports the calls of the layers inside it."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_thor.capture.watcher import ModuleHook, Watcher, first_argument
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.torch_internals import function_mode


class Report(Protocol):
    """Reports one call of a layer inside the module. Names of layers that are not preconditioned are ignored."""

    def __call__(self, name: str, x: Tensor, output: Any, kind: Kind | None = None) -> None:
        """Report the layer's name inside the module, its input, its output, and the kind of this call if it differs."""
        ...


class CompositeHook(ModuleHook):
    """Reports the inputs and outputs of the layers that one composite module computes.

    A subclass overrides :meth:`mode`, and :meth:`count` where its default does not fit the module.

    Args:
        module: the composite module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.layers: list[LayerCurvature] = []
        self.by_name: dict[str, LayerCurvature] = {}  # the layers that are preconditioned, by their names inside
        self._active: list[TorchFunctionMode] = []

    def add(self, name: str, layer: LayerCurvature) -> None:
        """Report the calls of a layer from now on.

        Args:
            name: the layer's name inside the module.
            layer: the layer.
        """
        self.by_name[name] = layer
        self.layers.append(layer)

    def mode(self, report: Report) -> TorchFunctionMode:
        """Return a function mode that is active while the module runs and reports the calls of the layers inside it.

        Args:
            report: to be called once per call of a layer. Inputs and outputs are batch first, ``(N, ..., features)``.

        Returns:
            A mode that has not been entered.
        """
        raise NotImplementedError

    def count(self, report: Report, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Report a call of the module from which the number of loss terms can be counted, without the mode.

        This is called on steps that gather no statistics of the module. By default every layer is reported with the
        module's first argument and its (first) output, which must be batch first.

        Args:
            report: to be called once per layer.
            args: the positional arguments of the module.
            kwargs: the keyword arguments of the module.
            output: the output of the module.
        """
        x = first_argument(self.module, args, kwargs)
        if isinstance(x, Tensor):
            for name in self.by_name:
                report(name, x, output[0] if isinstance(output, tuple) else output)

    def enter(self, subscriber: Watcher, args: Any) -> None:
        """Enter the mode, on a step that gathers statistics of the module.

        Args:
            subscriber: receives the calls of layers.
            args: not used.
        """
        if not torch.is_grad_enabled():
            return
        # Loss terms are counted without the mode, under which results are rounded differently.
        if not any(subscriber.gathers(layer) for layer in self.layers):
            return
        while self._active:  # Ctrl-C inside the forward: torch then calls no hook, and the mode is still active.
            stale = self._active.pop()
            if function_mode() is stale:
                stale.__exit__(None, None, None)
        mode = self.mode(self._report_to(subscriber))
        mode.__enter__()
        self._active.append(mode)

    def leave(self, subscriber: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Leave the mode; where none was entered, report what loss terms are counted from.

        Args:
            subscriber: receives the calls of layers.
            args: the positional arguments of the module.
            kwargs: the keyword arguments of the module.
            output: the output of the module.
        """
        # A module does not change the grad mode between these two hooks, so both see the same.
        if not torch.is_grad_enabled():
            return
        if self._active:
            self.abandon()
        else:
            self.count(self._report_to(subscriber), args, kwargs, output)

    def abandon(self) -> None:
        """Leave the mode if it has been entered."""
        if self._active:
            self._active.pop().__exit__(None, None, None)

    def _report_to(self, subscriber: Watcher) -> Report:
        def report(name: str, x: Tensor, output: Any, kind: Kind | None = None) -> None:
            layer = self.by_name.get(name)
            if layer is not None:
                subscriber.watch(layer, layer.kind if kind is None else kind, x, output)

        return report
