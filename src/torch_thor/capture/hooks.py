"""Reports the calls of layers on refresh steps, through PyTorch's global module hooks, which run before all others.

A hook on the module itself would be copied with the model (into a pickle that ``weights_only`` refuses, into an
averaged or a scripted model), and would see outputs that other hooks have replaced. On all other steps there are none.

Compiled code calls no hook that it was not compiled with (``torch._dynamo.config.skip_nnmodule_hook_guards``), and is
not to contain these. So while the model runs, the stance of ``torch.compile`` is ``force_eager``, which keeps compiled
code without running it, and ``model.compile()`` is suspended. Other models run compiled. A model that is called by a
compiled function has no call that could be seen first: then everything runs eagerly until the refresh is done.
"""

import inspect
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from torch_thor.capture.composites import CompositeHook
from torch_thor.capture.composites.hook import Watcher
from torch_thor.capture.layers import Layer
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.torch_internals import compile_stance, is_tracing, set_compile_stance

# torch.compile warns on every call of a compiled model while there are global hooks, because they see the call of the
# wrapper too. The hooks here only handle the modules of their model, so the warning does not apply to them.
_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"


class CalledModuleHook:
    """The hook on a module that is one layer: the rows are those of its own input and output."""

    def __init__(self, module: nn.Module, kind: Kind, layer: LayerCurvature) -> None:
        self.module = module
        self.layers = [layer]
        self.kind = kind

    def leave(self, watcher: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Report the first argument, also where it was passed by name, and the output of the module."""
        if not args:
            names = list(inspect.signature(type(self.module).forward).parameters)[1:2]
            args = [kwargs.get(name) for name in names]
        if args and isinstance(args[0], Tensor):
            watcher.watch(self.layers[0], self.kind, args[0], output)


ModuleHook = CalledModuleHook | CompositeHook


def hooks_of(found: Mapping[str, Layer], layers: Mapping[str, LayerCurvature]) -> list[ModuleHook]:
    """Make the hooks on the modules whose calls give rows to layers."""
    hooks: list[ModuleHook] = []
    composite: dict[int, CompositeHook] = {}
    for name, layer in found.items():
        hooks += [CalledModuleHook(module, kind, layers[name]) for module, kind in layer.modules]
        if layer.inside is not None:
            module = layer.inside.module
            hook = composite.get(id(module)) or composite.setdefault(id(module), layer.inside.hook(module))
            hook.by_name[layer.inside.name] = layers[name]
    return [*hooks, *composite.values()]


class ModuleCalls:
    """Handles the calls of some modules of one model, for a watcher that it does not keep alive."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = weakref.ref(watcher, lambda _: None if sys.is_finalizing() else self.close())
        self._remove: list[Any] = []  # what ends the present listening
        self._outermost: nn.Module | None = None  # the module of the model whose call is running
        self._by_function: bool | None = None  # whether compiled code calls the model; None while not yet called

    def listen(self, model: nn.Module, hooks: Iterable[ModuleHook], *, unseen: bool = False) -> None:
        """Handle the calls of the modules of these hooks, and of no others from now on.

        ``unseen``: calls were expected and have not been seen, as of a model that was compiled meanwhile.
        """
        self.close()
        self._handlers: dict[int, ModuleHook] = {id(hook.module): hook for hook in hooks}
        if not self._handlers:
            return
        self._own, self._containing = set(map(id, model.modules())), dict[int, bool]()
        warnings.filterwarnings("ignore", message=_COMPILE_WARNING, category=UserWarning)
        ignoring = warnings.filters[0]
        enter = torch_module.register_module_forward_pre_hook(self._enter)
        leave = torch_module.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        # first, because other global hooks may replace the output
        torch_module._global_forward_hooks.move_to_end(leave.id, last=False)  # type: ignore[attr-defined]
        self._remove = [
            enter.remove,
            leave.remove,
            # remove() leaves this entry behind, with which torch takes the hook for registered
            lambda: torch_module._global_forward_hooks_with_kwargs.pop(leave.id, None),
            lambda: ignoring in warnings.filters and warnings.filters.remove(ignoring),  # type: ignore[attr-defined]
            *(_suspended(module) for module in model.modules() if module._compiled_call_impl is not None),
        ]
        if self._by_function is not False or unseen:
            _eagerly.want(self)

    def close(self) -> None:
        """Handle no calls any more."""
        for remove in self._remove:
            remove()
        self._remove, self._outermost = [], None
        _eagerly.end(self)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or is_tracing():
            return
        if self._outermost is None and self._belongs(module):
            self._outermost, frame = module, sys._getframe()
            while frame is not None and not _runs_compiled_code(frame.f_code):
                frame = frame.f_back  # type: ignore[assignment]
            self._by_function = frame is not None
            _eagerly.want(self)
        handler, watcher = self._handlers.get(id(module)), self._watcher()
        if isinstance(handler, CompositeHook) and watcher is not None:
            handler.enter(watcher)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling() or is_tracing():
            return
        handler, watcher = self._handlers.get(id(module)), self._watcher()
        if handler is not None and watcher is not None:
            if len(rest) == 2:
                handler.leave(watcher, args, *rest)
            elif isinstance(handler, CompositeHook):  # torch passes no kwargs if an exception was raised
                handler.abandon()
        if module is self._outermost:
            self._outermost = None
            if not self._by_function:
                _eagerly.end(self)

    def _belongs(self, module: nn.Module) -> bool:
        """Return whether a module is of the model, or is ``torch.compile`` of something that contains some of it."""
        if id(module) in self._own or "_orig_mod" not in module._modules:
            return id(module) in self._own
        if id(module) not in self._containing:
            self._containing[id(module)] = not self._own.isdisjoint(map(id, module.modules()))
        return self._containing[id(module)]


class _Eagerly:
    """Sets the stance of ``torch.compile`` to ``force_eager`` while somebody wants it, in whatever order they end."""

    def __init__(self) -> None:
        self._wanted_by: set[int] = set()
        self._stance: tuple[Any, Any] | None = None  # the stance that was set here, and the one before

    def want(self, who: object) -> None:
        """Run eagerly, also where the user has set another stance since."""
        self._wanted_by.add(id(who))
        if self._stance is None or compile_stance() is not self._stance[0]:
            self._restore()
            before = compile_stance()
            torch.compiler.set_stance("force_eager")
            self._stance = compile_stance(), before

    def end(self, who: object) -> None:
        """Run as before, unless somebody else still wants it."""
        self._wanted_by.discard(id(who))
        if not self._wanted_by:
            self._restore()

    def _restore(self) -> None:
        if self._stance is None:
            return
        (own, before), self._stance = self._stance, None
        if compile_stance() is own:  # otherwise the user has set another stance since, which stays
            set_compile_stance(before)
        for field in fields(before):  # a context manager that was entered meanwhile restores this object on exit
            setattr(own, field.name, getattr(before, field.name))


_eagerly = _Eagerly()


def _runs_compiled_code(code: CodeType) -> bool:
    """Return whether a function runs compiled code, or would but for the stance; OptimizedModule.__call__ is seen."""
    return code.co_filename.endswith("_dynamo/eval_frame.py") and code.co_name != "__call__"


def _suspended(module: nn.Module) -> Any:
    """Let a module run without what its ``compile()`` has compiled; return a function that restores it."""
    compiled, module._compiled_call_impl = module._compiled_call_impl, None

    def restore() -> None:
        if module._compiled_call_impl is None:  # not compiled again meanwhile
            module._compiled_call_impl = compiled

    return restore
