"""Calls handlers before and after the forward of modules, through PyTorch's global module hooks.

The global hooks are registered while there is a subscriber, and removed when there is none. A hook on the module itself
would be copied with the model (into a pickle that ``weights_only`` refuses, an averaged model, a scripted one), and
would see outputs that other hooks have replaced; ours are global and run first.
"""

import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

# What torch.compile says on every call of a compiled model while there are global hooks: that they see the wrapper's
# call too. Ours look for the modules they know and pass over it.
_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"


class CallHandler(Protocol):
    """Handles the calls of one module."""

    module: nn.Module

    def enter(self, subscriber: Any, args: Any) -> None:
        """Called before the module's forward.

        Args:
            subscriber: the subscriber.
            args: the positional arguments.
        """
        ...

    def leave(self, subscriber: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Called after the module's forward.

        Args:
            subscriber: the subscriber.
            args: the positional arguments.
            kwargs: the arguments by name.
            output: what its own forward returned.
        """
        ...

    def abandon(self) -> None:
        """Called where the module's forward, or a hook on the module, has raised an exception."""
        ...


class ModuleCalls:
    """The subscribers, and the handlers of each."""

    def __init__(self) -> None:
        # by the identity of the subscriber; weak references, so that to subscribe keeps no object alive
        self._heard: dict[int, tuple[weakref.ref[Any], dict[int, CallHandler]]] = {}
        self._handles: list[RemovableHandle] = []
        self._quiet: Any = None

    def listen(self, subscriber: object, handlers: Iterable[CallHandler]) -> None:
        """Subscribe to the calls of some modules, and of no others from now on.

        Args:
            subscriber: the subscriber; an object that is dropped is one no more.
            handlers: one for each module; none to unsubscribe.
        """
        key, modules = id(subscriber), {id(one.module): one for one in handlers}
        if modules:

            def dropped(reference: weakref.ref[Any]) -> None:
                if not sys.is_finalizing() and key in self._heard and self._heard[key][0] is reference:
                    del self._heard[key]
                    self._settle()

            self._heard[key] = (weakref.ref(subscriber, dropped), modules)
        else:
            self._heard.pop(key, None)
        self._settle()

    def _settle(self) -> None:
        if self._heard:
            self._hush()
        if bool(self._heard) == bool(self._handles):
            return
        if self._heard:
            enter = torch_module.register_module_forward_pre_hook(self._enter)
            leave = torch_module.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            # before the global hooks of others, which may replace the output
            torch_module._global_forward_hooks.move_to_end(leave.id, last=False)  # type: ignore[attr-defined]
            self._handles = [enter, leave]
        else:
            for handle in self._handles:
                handle.remove()
                # torch forgets this one, and would go on to take the hook for registered
                torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
            self._handles = []
            if self._quiet in warnings.filters:
                warnings.filters.remove(self._quiet)  # type: ignore[attr-defined]

    def _hush(self) -> None:
        if self._quiet is not None and self._quiet in warnings.filters:
            return
        warnings.filterwarnings("ignore", message=_COMPILE_WARNING, category=UserWarning)
        self._quiet = warnings.filters[0]

    def _handlers_of(self, module: nn.Module) -> list[tuple[Any, CallHandler]]:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return []
        found = []
        for reference, modules in tuple(self._heard.values()):
            handler, subscriber = modules.get(id(module)), reference()
            if handler is not None and subscriber is not None:
                found.append((subscriber, handler))
        return found

    def _enter(self, module: nn.Module, args: Any) -> None:
        for subscriber, handler in self._handlers_of(module):
            handler.enter(subscriber, args)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        for subscriber, handler in self._handlers_of(module):
            if len(rest) == 2:
                handler.leave(subscriber, args, *rest)
            else:  # torch hands over no kwargs where something has raised
                handler.abandon()


module_calls = ModuleCalls()
