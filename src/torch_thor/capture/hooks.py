"""The reports of layers' calls on refresh steps, through PyTorch's global module hooks.

Global hooks run before all others.

A hook on the module itself would be copied with the model (into a pickle that ``weights_only``
refuses, into an averaged or a scripted model), and would see outputs that other hooks have
replaced. On all other steps there are none.

Compiled code calls no hook that it was not compiled with
(``torch._dynamo.config.skip_nnmodule_hook_guards``), and is not to contain these. So while the
model runs, the stance of ``torch.compile`` is ``force_eager``, which keeps compiled code without
running it, and ``model.compile()`` is suspended. Other models run compiled. A model that is called
by a compiled function has no call that could be seen first: then everything runs eagerly until the
refresh is done.
"""

import inspect
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from torch_thor.capture.composites import CompositeHook
from torch_thor.capture.composites.hook import Watcher
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import Layer, LayerCurvature
from torch_thor.torch_internals import compile_stance, is_tracing

# torch.compile warns on every call of a compiled model while there are global hooks, because they
# see the call of the wrapper too. The hooks here only handle the modules of their model, so the
# warning does not apply to them.
_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"


class CalledModuleHook:
    """The hook on a module that is one layer: the rows are those of its own input and output."""

    def __init__(self, module: nn.Module, kind: Kind, layer: LayerCurvature) -> None:
        self.module = module
        self.layers = [layer]
        self.kind = kind

    def leave(self, watcher: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Report the module's first argument, even if passed by name, and its output."""
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
            hook = composite.get(id(module)) or composite.setdefault(
                id(module), layer.inside.hook(module)
            )
            hook.by_name[layer.inside.name] = layers[name]
    return [*hooks, *composite.values()]


class ModuleCalls:
    """Handles the calls of some modules of one model, for a watcher that it does not keep alive."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = weakref.ref(
            watcher, lambda _: None if sys.is_finalizing() else self.close()
        )
        self._at_close = ExitStack()  # what ends the present listening
        self._ignoring: Any = None  # the filter of torch's warning
        self._outermost: nn.Module | None = None  # the module of the model whose call is running
        # whether compiled code calls the model; None while not yet called
        self._by_function: bool | None = None
        # whether modules that torch.nn.DataParallel makes for one forward pass have run
        self.ran_as_replicas = False

    def listen(
        self, model: nn.Module, hooks: Iterable[ModuleHook], *, unseen: bool = False
    ) -> None:
        """Handle the calls of the modules of these hooks, and of no others from now on.

        ``unseen``: calls were expected and have not been seen, as of a model that was compiled
        meanwhile.
        """
        self.close()
        self.ran_as_replicas = False
        self._handlers: dict[int, ModuleHook] = {id(hook.module): hook for hook in hooks}
        if not self._handlers:
            return
        self._own = set(map(id, model.modules()))
        warnings.filterwarnings("ignore", message=_COMPILE_WARNING, category=UserWarning)
        self._ignoring = warnings.filters[0]
        enter = torch_module.register_module_forward_pre_hook(self._enter)
        leave = torch_module.register_module_forward_hook(
            self._leave, with_kwargs=True, always_call=True
        )
        # first, because other global hooks may replace the output
        torch_module._global_forward_hooks.move_to_end(leave.id, last=False)  # type: ignore[attr-defined]
        # remove() leaves this entry behind, with which torch takes the hook for registered
        self._at_close.callback(torch_module._global_forward_hooks_with_kwargs.pop, leave.id, None)
        self._at_close.callback(leave.remove)
        self._at_close.callback(enter.remove)
        for module in model.modules():
            if module._compiled_call_impl is not None:
                self._at_close.enter_context(_suspended(module))
        _run_eagerly(self, wanted=self._by_function is not False or unseen)

    def close(self) -> None:
        """Handle no calls any more."""
        self._at_close.close()
        if self._ignoring in warnings.filters:
            warnings.filters.remove(self._ignoring)  # type: ignore[attr-defined]
        self._outermost = self._ignoring = None
        _run_eagerly(self, wanted=False)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or is_tracing():
            return
        if getattr(module, "_is_replica", False):
            self.ran_as_replicas = True
        if self._outermost is None and (
            id(module) in self._own
            # torch.compile of something that contains some of the model
            or (
                "_orig_mod" in module._modules
                and not self._own.isdisjoint(map(id, module.modules()))
            )
        ):
            self._outermost = module
            frame: FrameType | None = sys._getframe()
            while frame is not None and not (
                # a function that runs compiled code, or would but for the stance;
                # OptimizedModule.__call__ is seen
                frame.f_code.co_filename.endswith("_dynamo/eval_frame.py")
                and frame.f_code.co_name != "__call__"
            ):
                frame = frame.f_back
            # torch.compiler.disable, as around a closure that step() calls, has no callback
            by_function = frame is not None and frame.f_locals["self"].callback is not None
            # An evaluation does not show how the training calls the model, nor does a model that
            # was compiled in place since, which the next refresh suspends. And what compiled code
            # has called once it may call again, whoever calls the model in between.
            if torch.is_grad_enabled() and module._compiled_call_impl is None:
                self._by_function = by_function
            _run_eagerly(self, wanted=True)
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
            # torch passes no kwargs if an exception was raised
            elif isinstance(handler, CompositeHook):
                handler.abandon()
        if module is self._outermost:
            self._outermost = None
            if self._by_function is False:
                _run_eagerly(self, wanted=False)


_eager: set[int] = set()  # the `id` of each ModuleCalls that wants everything to run eagerly
# those of ``torch.compile`` that are changed meanwhile, and what they said
suspended_stances: list[tuple[Any, str]] = []


def _run_eagerly(calls: ModuleCalls, *, wanted: bool) -> None:
    """Run everything eagerly while somebody wants it, in whatever order they end."""
    # Stances are changed in place, not replaced: a context manager of the user that is entered
    # meanwhile sets another, and sets this one again when it is left, whether it is still wanted or
    # not.
    _eager.discard(id(calls))
    if wanted:
        _eager.add(id(calls))
    stance = compile_stance(torch)
    if _eager and stance.stance != "force_eager":
        suspended_stances.append((stance, stance.stance))
        stance.stance = "force_eager"
    while suspended_stances and not _eager:
        stance, before = suspended_stances.pop()
        stance.stance = before


@contextmanager
def _suspended(module: nn.Module) -> Iterator[None]:
    """Let a module run without what its ``compile()`` has compiled."""
    compiled, module._compiled_call_impl = module._compiled_call_impl, None
    yield
    if module._compiled_call_impl is None:  # not compiled again meanwhile
        module._compiled_call_impl = compiled
