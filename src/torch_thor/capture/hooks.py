"""The reports of layers' calls on refresh steps, through PyTorch's global module hooks.

Global hooks run before all others. For each module one object reports the calls of the layers that
it computes; while the forward of a composite module runs, a function mode reports them.

A hook on the module itself would be copied with the model (into a pickle that ``weights_only``
refuses, into an averaged or a scripted model), and would see outputs that other hooks have
replaced. On all other steps there are none.

Compiled code calls no hook that it was not compiled with, and is not to contain these. So while
there are hooks, the stance of ``torch.compile`` is ``force_eager``: everything runs eagerly, and
compiled code is kept.
"""

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.torch_internals import compile_stance, function_mode, is_tracing


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
        """Report the layer's name inside the module, its input, its output, and another kind."""
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
            watcher.watch(self.by_name[""], self._kind, args[0], output)


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

    def report(
        self, watcher: Watcher, name: str, x: Tensor, output: Any, kind: Kind | None = None
    ) -> None:
        """Tell a watcher of a call of a layer, if that is preconditioned."""
        layer = self.by_name.get(name)
        if layer is not None:
            watcher.watch(layer, layer.kind if kind is None else kind, x, output)

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


# ---- the calls of a model's modules --------------------------------------------------------------

# torch.compile warns on every call of a compiled model while there are global hooks, because they
# see the call of the wrapper too. The hooks here only handle the modules of their model, so the
# warning does not apply to them.
_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"


class ModuleCalls:
    """Handles the calls of some modules of one model, for a watcher that it does not keep alive."""

    def __init__(self, watcher: Watcher) -> None:
        ends = sys.is_finalizing  # at the end of the program sys may be gone
        self._watcher = weakref.ref(watcher, lambda _: None if ends() else self.close())
        self._at_close = ExitStack()  # what ends the present listening

    def listen(self, hooks: Iterable[ModuleHook]) -> None:
        """Handle the calls of the modules of these hooks, and of no others from now on."""
        self.close()
        self._handlers: dict[int, ModuleHook] = {id(hook.module): hook for hook in hooks}
        if not self._handlers:
            return
        warnings.filterwarnings("ignore", message=_COMPILE_WARNING, category=UserWarning)
        enter = torch_module.register_module_forward_pre_hook(self._enter)
        leave = torch_module.register_module_forward_hook(
            self._leave, with_kwargs=True, always_call=True
        )
        # first, because other global hooks may replace the output
        registered: Any = torch_module._global_forward_hooks
        registered.move_to_end(leave.id, last=False)
        # remove() leaves this entry behind, with which torch takes the hook for registered
        self._at_close.callback(torch_module._global_forward_hooks_with_kwargs.pop, leave.id, None)
        self._at_close.callback(leave.remove)
        self._at_close.callback(enter.remove)
        _run_eagerly(self, wanted=True)
        self._at_close.callback(_run_eagerly, self, wanted=False)

    def close(self) -> None:
        """Handle no calls any more."""
        self._at_close.close()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or is_tracing():
            return
        handler, watcher = self._handlers.get(id(module)), self._watcher()
        if isinstance(handler, CompositeHook) and watcher is not None:
            handler.enter(watcher)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling() or is_tracing():
            return
        handler, watcher = self._handlers.get(id(module)), self._watcher()
        if handler is not None and watcher is not None:
            # torch passes no kwargs if an exception was raised
            handler.leave(watcher, args, *(rest if len(rest) == 2 else ({}, None)))


_eager: set[int] = set()  # the `id` of each ModuleCalls that wants everything to run eagerly
_stances: list[tuple[Any, str]] = []  # those that are changed meanwhile, and what they said


def _run_eagerly(calls: ModuleCalls, *, wanted: bool) -> None:
    """Run everything eagerly while somebody wants it, in whatever order they end."""
    # A stance is changed in place and not replaced: a context manager of the user that is entered
    # meanwhile sets another, and sets this stance again when it is left.
    (_eager.add if wanted else _eager.discard)(id(calls))
    stance = compile_stance(torch)
    if _eager and stance.stance != "force_eager":
        _stances.append((stance, stance.stance))
        stance.stance = "force_eager"
    while _stances and not _eager:
        stance, before = _stances.pop()
        stance.stance = before
