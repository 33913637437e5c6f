"""Calls handlers before and after the forward of modules, through PyTorch's global module hooks.

The global hooks are registered while there is a subscriber, and removed when there is none. A hook on the module itself
would be copied with the model (into a pickle that ``weights_only`` refuses, into an averaged or a scripted model), and
would see outputs that other hooks have replaced. The hooks here are global and run before all other global hooks.

Compiled code calls no hook that it was not compiled with. So while there is a subscriber, the stance of
``torch.compile`` is set to ``force_eager``: compiled code is kept but not run. It therefore contains none of these
hooks, has no graph break because of them, and is not compiled again.
"""

import sys
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from torch_thor.torch_internals import compile_stance, is_tracing, set_compile_stance

# torch.compile warns on every call of a compiled model while there are global hooks, because they see the call of the
# wrapper too. The hooks here only handle the modules of subscribers, so the warning does not apply to them.
_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"


class CallHandler:
    """Handles the calls of one module; the methods of this base class do nothing."""

    module: nn.Module

    def enter(self, subscriber: Any, args: Any) -> None:
        """Called before the module's forward."""

    def leave(self, subscriber: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Called after the module's forward."""

    def abandon(self) -> None:
        """Called if the module's forward, or a hook on the module, has raised an exception."""


class ModuleCalls:
    """The subscribers of this process, and the handlers of each of them."""

    def __init__(self) -> None:
        # by the identity of the subscriber; references are weak, so that a subscription keeps no object alive
        self.subscribers: dict[int, tuple[weakref.ref[Any], dict[int, CallHandler]]] = {}
        self._handles: list[RemovableHandle] = []
        self._filter: Any = None  # the warning filter that was set here
        self._stance: Any = None  # the stance of torch.compile that was set here
        self._stance_before: Any = None

    def listen(self, subscriber: object, handlers: Iterable[CallHandler]) -> None:
        """Subscribe to the calls of some modules, and of no others from now on."""
        key, modules = id(subscriber), {}
        for handler in handlers:
            modules[id(handler.module)] = handler
        if not modules:
            if self.subscribers.pop(key, None) is not None:
                (self._open if self.subscribers else self._close)()
            return

        def dropped(reference: weakref.ref[Any]) -> None:
            if not sys.is_finalizing() and key in self.subscribers and self.subscribers[key][0] is reference:
                del self.subscribers[key]
                (self._open if self.subscribers else self._close)()

        self.subscribers[key] = (weakref.ref(subscriber, dropped), modules)
        self._open()

    def _open(self) -> None:
        """Register the global hooks and make compiled code run eagerly, unless both has been done."""
        if self._handles:
            if compile_stance() is self._stance and self._filter in warnings.filters:
                return
            self._close()  # the user has set a stance since: it is replaced here, and restored by the next _close()
        warnings.filterwarnings("ignore", message=_COMPILE_WARNING, category=UserWarning)
        self._filter = warnings.filters[0]
        enter = torch_module.register_module_forward_pre_hook(self._enter)
        leave = torch_module.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        # first, because other global hooks may replace the output
        torch_module._global_forward_hooks.move_to_end(leave.id, last=False)  # type: ignore[attr-defined]
        self._handles = [enter, leave]
        self._stance_before = compile_stance()
        torch.compiler.set_stance("force_eager")
        self._stance = compile_stance()

    def _close(self) -> None:
        """Remove the global hooks, and allow compiled code to run again."""
        for handle in self._handles:
            handle.remove()
            # handle.remove() leaves this entry behind, with which torch takes the hook for registered
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles = []
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        own, before = self._stance, self._stance_before
        if compile_stance() is own:  # otherwise the user has set another stance since, which stays
            set_compile_stance(before)
        for field in fields(before):  # a context manager that was entered meanwhile restores this object on exit
            setattr(own, field.name, getattr(before, field.name))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or is_tracing():
            return
        for reference, modules in tuple(self.subscribers.values()):
            handler, subscriber = modules.get(id(module)), reference()
            if handler is not None and subscriber is not None:
                handler.enter(subscriber, args)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling() or is_tracing():
            return
        for reference, modules in tuple(self.subscribers.values()):
            handler, subscriber = modules.get(id(module)), reference()
            if handler is None or subscriber is None:
                continue
            if len(rest) == 2:
                handler.leave(subscriber, args, *rest)
            else:  # torch passes no kwargs if an exception was raised
                handler.abandon()


module_calls = ModuleCalls()
