"""The hooks on modules: which layers the input and output of a module's call are handed over for.

A module that is a layer hands over its own input and output (:class:`CalledModuleHook`). An attention, a recurrent
layer or a module of fused experts computes several layers without calling a module for any of them: while its forward
runs, a function mode makes their inputs and outputs visible (:class:`OpenedModuleHook`). When the hooks are called is
the matter of :mod:`torch_thor.capture.module_calls`.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from torch_thor.capture.attention import OpenAttention
from torch_thor.capture.inspection import Layer
from torch_thor.capture.module_calls import CallHandler
from torch_thor.capture.recurrence import OpenRecurrence
from torch_thor.capture.routing import OpenExperts
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.kinds.experts import ExpertsKind
from torch_thor.curvature.kinds.recurrent import RecurrentCall, RecurrentKind
from torch_thor.curvature.layer import LayerCurvature


class Watcher(Protocol):
    """Receives the input and output of each layer that has run."""

    def gathers(self, layer: LayerCurvature) -> bool:
        """Return whether rows of a layer are wanted."""
        ...

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Receive one call: the layer, the geometry of the module that ran, its input and its output."""
        ...


class ModuleHook(CallHandler, Protocol):
    """The hook on one module, whose calls give rows to one or more layers."""

    layers: list[LayerCurvature]


class CalledModuleHook:
    """The hook on a module that is a layer: the rows are those of its own input and output.

    Args:
        module: the module.
        kind: its geometry.
        layer: the layer.
    """

    def __init__(self, module: nn.Module, kind: Kind, layer: LayerCurvature) -> None:
        self.module = module
        self.layers = [layer]
        self.kind = kind
        arguments = list(inspect.signature(type(module).forward).parameters)[1:]
        self._input = arguments[0] if arguments else "input"

    def enter(self, subscriber: Watcher, args: Any) -> None:
        """Do nothing.

        Args:
            subscriber: receives the calls of layers.
            args: the module's arguments.
        """

    def leave(self, subscriber: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Hand over input and output.

        Args:
            subscriber: receives the calls of layers.
            args: the module's arguments.
            kwargs: those by name.
            output: its output.
        """
        x = args[0] if args else kwargs.get(self._input)
        if isinstance(x, Tensor):
            subscriber.watch(self.layers[0], self.kind, x, output)

    def abandon(self) -> None:
        """Do nothing."""


class OpenedModuleHook:
    """The hook on a module that computes several layers without calling a module for any of them.

    While its forward runs, a ``TorchFunctionMode`` is active, which makes their inputs and outputs visible.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layers: list[LayerCurvature] = []
        self.by_name: dict[str, LayerCurvature] = {}
        self._open: list[TorchFunctionMode] = []

    def add(self, name: str, layer: LayerCurvature) -> None:
        """Take a layer in.

        Args:
            name: the mode's name for it.
            layer: the layer.
        """
        self.by_name[name] = layer
        self.layers.append(layer)

    def mode(self, subscriber: Watcher) -> TorchFunctionMode:
        """Return the mode that is active while the module runs.

        Args:
            subscriber: receives the calls of layers.
        """
        raise NotImplementedError

    def count(self, subscriber: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Hand over what the loss terms can be counted from, on a step in which no rows are wanted.

        Args:
            subscriber: receives the calls of layers.
            args: the module's arguments.
            kwargs: those by name.
            output: its output.
        """
        raise NotImplementedError

    def enter(self, subscriber: Watcher, args: Any) -> None:
        """Activate the mode, on a step in which rows of the module are wanted.

        Args:
            subscriber: receives the calls of layers.
            args: the module's arguments.
        """
        if not torch.is_grad_enabled():
            return
        # loss terms are counted without the mode, which rounds otherwise
        if not any(subscriber.gathers(layer) for layer in self.layers):
            return
        while self._open:  # Ctrl-C inside its forward: torch runs no hook then, and the mode is still there
            stale = self._open.pop()
            if _get_current_function_mode() is stale:
                stale.__exit__(None, None, None)
        mode = self.mode(subscriber)
        mode.__enter__()
        self._open.append(mode)

    def leave(self, subscriber: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Deactivate the mode; where there is none, hand over what loss terms are counted from.

        Args:
            subscriber: receives the calls of layers.
            args: the module's arguments.
            kwargs: those by name.
            output: its output.
        """
        # grad mode may not change in between: enter and leave see the same
        if not torch.is_grad_enabled():
            return
        if self._open:
            self.abandon()
        else:
            self.count(subscriber, args, kwargs, output)

    def abandon(self) -> None:
        """Deactivate the mode."""
        if self._open:
            self._open.pop().__exit__(None, None, None)


class AttentionHook(OpenedModuleHook):
    """An ``nn.MultiheadAttention``: up to four layers, ``"q"``, ``"k"``, ``"v"`` and ``"out"``."""

    def mode(self, subscriber: Watcher) -> TorchFunctionMode:
        """Return the mode that takes the projections out of the attention function.

        Args:
            subscriber: receives the calls of layers.

        Returns:
            The mode.
        """

        def watch(projection: str, x: Tensor, y: Tensor) -> None:
            layer = self.by_name.get(projection)
            if layer is not None:
                subscriber.watch(layer, layer.kind, x, y)

        return OpenAttention(watch)

    def count(self, subscriber: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Count the sequences of the query.

        Args:
            subscriber: receives the calls of layers.
            args: the module's arguments.
            kwargs: those by name.
            output: its output.
        """
        query = args[0] if args else kwargs["query"]
        batch_first = query if self.module.batch_first or query.dim() < 3 else query.transpose(0, 1)
        for layer in self.layers:
            subscriber.watch(layer, layer.kind, batch_first, output[0])


class ExpertsHook(OpenedModuleHook):
    """The module of fused experts: a layer for each of its 3-d weights, by the weight's name."""

    def mode(self, subscriber: Watcher) -> TorchFunctionMode:
        """Return the mode that sees the products with the experts' weights.

        Args:
            subscriber: receives the calls of layers.

        Returns:
            The mode.
        """

        def watch(name: str, kind: ExpertsKind, x: Tensor, y: Tensor) -> None:
            subscriber.watch(self.by_name[name], kind, x, y)

        # looked up now: a wrapper may have replaced the parameters, and pruning taken one away
        there = {name: layer for name, layer in self.by_name.items() if layer.weight_view.is_there}
        kinds = {name: (layer.weight, layer.kind) for name, layer in there.items()}
        return OpenExperts({n: (w, k) for n, (w, k) in kinds.items() if isinstance(k, ExpertsKind)}, watch)

    def count(self, subscriber: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Do nothing: the number of rows that a router sends to an expert is not a number of loss terms.

        Args:
            subscriber: receives the calls of layers.
            args: the module's arguments.
            kwargs: those by name.
            output: its output.
        """


class RecurrentHook(OpenedModuleHook):
    """A recurrent layer or cell: a layer for each of its weights, by the weight's name."""

    def mode(self, subscriber: Watcher) -> TorchFunctionMode:
        """Return the mode that computes the recurrence step by step.

        Args:
            subscriber: receives the calls of layers.

        Returns:
            The mode.
        """

        def watch(name: str, batch: int, x: Tensor, y: Tensor) -> None:
            layer = self.by_name.get(name)
            if layer is not None:
                subscriber.watch(layer, self._call(layer, batch, packed=x.dim() == 2 and self._is_sequence), x, y)

        return OpenRecurrence(getattr(self.module, "_flat_weights_names", ()), watch)

    def count(self, subscriber: Watcher, args: Any, kwargs: Any, output: Any) -> None:
        """Count the sequences.

        Args:
            subscriber: receives the calls of layers.
            args: the module's arguments.
            kwargs: those by name.
            output: its output.
        """
        x = args[0] if args else kwargs["input"]
        y = output[0] if isinstance(output, tuple) else output
        packed = isinstance(x, PackedSequence)
        if packed:
            batch, x, y = int(x.batch_sizes[0]), x.data, y.data
        elif x.dim() == (2 if self._is_sequence else 1):
            batch, x = 1, x[None]
        elif self._is_sequence and not self.module.batch_first:
            batch, x = x.shape[1], x.transpose(0, 1)
        else:
            batch = len(x)
        for layer in self.layers:
            subscriber.watch(layer, self._call(layer, batch, packed=packed), x, y)

    @property
    def _is_sequence(self) -> bool:
        return isinstance(self.module, nn.RNNBase)

    @staticmethod
    def _call(layer: LayerCurvature, batch: int, *, packed: bool) -> Kind:
        assert isinstance(layer.kind, RecurrentKind)
        return RecurrentCall(layer.kind, batch, packed=packed)


def hooks_of(found: Mapping[str, Layer], layers: Mapping[str, LayerCurvature]) -> list[ModuleHook]:
    """Make the hooks on the modules that layers get their rows from.

    Args:
        found: what the inspection found of each layer.
        layers: their curvature, by the same names.

    Returns:
        One hook a module.
    """
    hooks: list[ModuleHook] = []
    opened: dict[int, OpenedModuleHook] = {}
    for name, layer in found.items():
        hooks += [CalledModuleHook(module, kind, layers[name]) for module, kind in layer.modules]
        for hook, part in (
            (AttentionHook, layer.attention),
            (ExpertsHook, layer.experts),
            (RecurrentHook, layer.recurrent),
        ):
            if part is not None:
                module, inside = part
                opened.setdefault(id(module), hook(module)).add(inside, layers[name])
    return [*hooks, *opened.values()]
