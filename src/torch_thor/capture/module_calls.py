"""Calls handlers before and after the forward of modules, through PyTorch's global module hooks.

The global hooks are registered while there is a subscriber, and removed when there is none. A hook on the module itself
would be copied with the model (into a pickle that ``weights_only`` refuses, an averaged model, a scripted one), and
would see outputs that other hooks have replaced; ours are global and run first.

Compiled code calls no hook that it was not compiled with. So while there is a subscriber, the stance of
``torch.compile`` is ``force_eager``: compiled code is not used, and is kept as it is. It has no hook of ours in it, no
graph break, and is not compiled again.
"""

import sys
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import fields
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
    """The subscribers of the process, and the handlers of each."""

    def __init__(self) -> None:
        # by the identity of the subscriber; weak references, so that to subscribe keeps no object alive
        self.subscribers: dict[int, tuple[weakref.ref[Any], dict[int, CallHandler]]] = {}
        self._handles: list[RemovableHandle] = []
        self._filter: Any = None  # the warning filter that was set here
        self._stance: Any = None  # the stance of torch.compile that was set here
        self._stance_before: Any = None

    def listen(self, subscriber: object, handlers: Iterable[CallHandler]) -> None:
        """Subscribe to the calls of some modules, and of no others from now on.

        Args:
            subscriber: the subscriber; an object that is dropped is one no more.
            handlers: one for each module; none to unsubscribe.
        """
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
        """Register the global hooks, and have compiled code run eagerly, unless both is so."""
        from torch._dynamo import eval_frame

        if self._handles:
            if eval_frame._stance is self._stance and self._filter in warnings.filters:
                return
            self._close()  # the user has set a stance since: ours takes its place, and it holds again after ours
        warnings.filterwarnings("ignore", message=_COMPILE_WARNING, category=UserWarning)
        self._filter = warnings.filters[0]
        enter = torch_module.register_module_forward_pre_hook(self._enter)
        leave = torch_module.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        # before the global hooks of others, which may replace the output
        torch_module._global_forward_hooks.move_to_end(leave.id, last=False)  # type: ignore[attr-defined]
        self._handles = [enter, leave]
        self._stance_before = eval_frame._stance
        torch.compiler.set_stance("force_eager")
        self._stance = eval_frame._stance

    def _close(self) -> None:
        """Remove the global hooks, and let compiled code run again."""
        from torch._dynamo import eval_frame

        for handle in self._handles:
            handle.remove()
            # torch forgets this one, and would go on to take the hook for registered
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles = []
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        ours, before = self._stance, self._stance_before
        if eval_frame._stance is ours:  # else the user has set another one since, and it stays
            eval_frame._set_stance(before)
        for field in fields(before):  # a context that was entered under our stance puts it back on leaving
            setattr(ours, field.name, getattr(before, field.name))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        for reference, modules in tuple(self.subscribers.values()):
            handler, subscriber = modules.get(id(module)), reference()
            if handler is not None and subscriber is not None:
                handler.enter(subscriber, args)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        for reference, modules in tuple(self.subscribers.values()):
            handler, subscriber = modules.get(id(module)), reference()
            if handler is None or subscriber is None:
                continue
            if len(rest) == 2:
                handler.leave(subscriber, args, *rest)
            else:  # torch hands over no kwargs where something has raised
                handler.abandon()


module_calls = ModuleCalls()
