"""The hooks on modules: each reports the calls of the layers that its module computes.

While the forward of a composite module runs, a function mode reports them.
"""

import inspect
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.torch_internals import function_mode


class Watcher(Protocol):
    """Receives the input and output of each call of a layer."""

    @property
    def gathering(self) -> Set[LayerCurvature]:
        """The layers whose statistics are gathered in this step."""
        ...

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Receive one call: its layer, the kind to read its rows with, its input and output."""
        ...


class Report(Protocol):
    """A report of one call of a layer inside the module.

    Names of layers that are not preconditioned are ignored.
    """

    def __call__(self, name: str, x: Tensor, output: Any, kind: Kind | None = None) -> None:
        """Report the layer's name inside the module, its input and its output."""
        # The kind of this call is given, too, if it differs.
        ...


class FunctionCalls(TorchFunctionMode):
    """A mode that makes another call in the place of each call of one of torch's functions.

    Args:
        call: called with the function, its arguments and its keyword arguments, returns the result.
    """

    def __init__(self, call: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make the other call."""
        return self._call(func, args, kwargs or {})


class ModuleHook:
    """The hook on a module.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        # the layers that are preconditioned, by their names inside; the module itself has none
        self.by_name: dict[str, LayerCurvature] = {}

    @property
    def layers(self) -> list[LayerCurvature]:
        """The layers whose calls are reported."""
        return list(self.by_name.values())

    def report(
        self, watcher: Watcher, name: str, x: Tensor, output: Any, kind: Kind | None = None
    ) -> None:
        """Tell a watcher of a call of a layer, if that is preconditioned."""
        layer = self.by_name.get(name)
        if layer is not None:
            watcher.watch(layer, layer.kind if kind is None else kind, x, output)

    def enter(self, watcher: Watcher) -> None:
        """Handle that the module is about to run."""

    def leave(self, watcher: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Handle that it has run; ``output`` is None if it has raised an exception."""


class CalledModuleHook(ModuleHook):
    """The hook on a module that is one layer: the rows are those of its own input and output."""

    def __init__(self, module: nn.Module, kind: Kind) -> None:
        super().__init__(module)
        self._kind = kind

    def leave(self, watcher: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Report the module's first argument, even if passed by name, and its output."""
        if not args:
            names = list(inspect.signature(type(self.module).forward).parameters)[1:2]
            args = [kwargs.get(name) for name in names]
        if args and isinstance(args[0], Tensor):
            self.report(watcher, "", args[0], output, self._kind)


class CompositeHook(ModuleHook):
    """Reports the inputs and outputs of the layers that one composite module computes.

    A subclass overrides ``call``, or ``mode`` for a mode of its own.

    Args:
        module: the composite module.
    """

    _active: TorchFunctionMode | None = None

    def mode(self, report: Report) -> TorchFunctionMode:
        """Return a function mode that reports the calls of the layers inside the module.

        It is active while the module runs.

        The mode must not change what the module computes, and is active only on steps that gather
        statistics.

        Args:
            report: to be called once per call of a layer. Inputs and outputs are batch first,
                ``(N, ..., features)``.

        Returns:
            A mode that has not been entered.
        """
        return FunctionCalls(partial(self.call, report))

    def call(
        self, report: Report, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Make another call in the place of a call of one of torch's functions.

        Args:
            report: as for ``mode``.
            func: the function.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            The function's result, or what stands in its place.
        """
        raise NotImplementedError

    def enter(self, watcher: Watcher) -> None:
        """Enter the mode, where statistics of the module are gathered."""
        if watcher.gathering.isdisjoint(self.layers) or not torch.is_grad_enabled():
            return
        # Ctrl-C inside the forward: torch then calls no hook that leaves the mode.
        if function_mode() is self._active:
            self._abandon()
        self._active = self.mode(partial(self.report, watcher))
        self._active.__enter__()

    def leave(self, watcher: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Leave the mode."""
        # A module does not change the grad mode between these two hooks, so both see the same.
        if torch.is_grad_enabled():
            self._abandon()

    def _abandon(self) -> None:
        """Leave the mode if it has been entered."""
        active, self._active = self._active, None
        if active is not None:
            active.__exit__(None, None, None)
