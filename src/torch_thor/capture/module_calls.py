"""The calls of modules, for whoever waits for statistics: hooks of the process, never of a model.

PyTorch's global module hooks are there while somebody waits and gone afterwards. A hook on a module would go along with
every copy of the model that is made meanwhile (a pickle that ``weights_only`` refuses, an averaged model, a scripted
one), and would see the outputs that other hooks have replaced; a global one runs first.
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


class Listener(Protocol):
    """Something that hears of the calls of one module."""

    module: nn.Module

    def enter(self, hearer: Any, args: Any) -> None:
        """Take note that the module is about to run.

        Args:
            hearer: who listens.
            args: the positional arguments.
        """
        ...

    def leave(self, hearer: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Take note that the module has run.

        Args:
            hearer: who listens.
            args: the positional arguments.
            kwargs: the arguments by name.
            output: what its own forward returned.
        """
        ...

    def abandon(self) -> None:
        """Take note that its forward, or a hook on it, has raised."""
        ...


class ModuleCalls:
    """Tells those who listen of the calls of their modules."""

    def __init__(self) -> None:
        # by the identity of who listens; weak, so that nobody is kept alive by listening
        self._heard: dict[int, tuple[weakref.ref[Any], dict[int, Listener]]] = {}
        self._handles: list[RemovableHandle] = []
        self._quiet: Any = None

    def listen(self, hearer: object, listeners: Iterable[Listener]) -> None:
        """Tell somebody of the calls of some modules, and of no others from now on.

        Args:
            hearer: who listens; one that is dropped listens no more.
            listeners: what hears of the calls, one a module; none to stop.
        """
        key, modules = id(hearer), {id(one.module): one for one in listeners}
        if modules:

            def dropped(reference: weakref.ref[Any]) -> None:
                if not sys.is_finalizing() and key in self._heard and self._heard[key][0] is reference:
                    del self._heard[key]
                    self._settle()

            self._heard[key] = (weakref.ref(hearer, dropped), modules)
        else:
            self._heard.pop(key, None)
        self._settle()

    def heard(self, hearer: object) -> list[nn.Module]:
        """Return the modules whose calls somebody is told of.

        Args:
            hearer: who listens.

        Returns:
            The modules.
        """
        return [one.module for one in self._heard[id(hearer)][1].values()] if id(hearer) in self._heard else []

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

    def _listeners(self, module: nn.Module) -> list[tuple[Any, Listener]]:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return []
        found = []
        for reference, modules in tuple(self._heard.values()):
            listener, hearer = modules.get(id(module)), reference()
            if listener is not None and hearer is not None:
                found.append((hearer, listener))
        return found

    def _enter(self, module: nn.Module, args: Any) -> None:
        for hearer, listener in self._listeners(module):
            listener.enter(hearer, args)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        for hearer, listener in self._listeners(module):
            if len(rest) == 2:
                listener.leave(hearer, args, *rest)
            else:  # torch hands over no kwargs where something has raised
                listener.abandon()


module_calls = ModuleCalls()
