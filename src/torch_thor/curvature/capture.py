"""Where rows come from: one forward hook a layer, and on refresh steps a hook on the layer's output.

The forward hook tests one flag and leaves. Only where statistics are wanted does it hang a hook on the output's
gradient, which gets both rows at once: so an evaluation pass, a pass whose loss is never differentiated, and the first
of the two passes of activation checkpointing leave nothing behind, and the input is kept alive no longer than autograd
keeps it anyway.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from torch_thor.curvature.layer import LayerCurvature


def inert_hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Do nothing: what a copied or unpickled model has in the place of a hook, whose optimizer is not its own."""


def _inert() -> Any:
    return inert_hook


class _ForwardHook:
    """The flag test, and the door to :meth:`Capture.watch`."""

    def __init__(self, capture: "Capture", layer: LayerCurvature) -> None:
        # weak, so that a model does not keep alive an optimizer that its user has dropped
        self._capture = weakref.ref(capture)
        self._layer = weakref.ref(layer)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        layer = self._layer()
        if layer is None or not (layer.armed or layer.counts) or not torch.is_grad_enabled():
            return
        capture = self._capture()
        if capture is not None:
            capture.watch(layer, args[0] if args else kwargs["input"], output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return inert_hook

    def __reduce__(self) -> Any:
        return _inert, ()


class Capture:
    """Gathers the statistics of all layers, and counts the loss terms of the step.

    Args:
        layers: the layers to watch.
    """

    def __init__(self, layers: Sequence[LayerCurvature]) -> None:
        self._layers = list(layers)
        self._order = itertools.count()
        # backward pass -> (order of its first layer in the forward pass, leading dimension of that layer's input)
        self._terms: dict[int, tuple[int, int]] = {}
        self._parents: dict[int, int] = {}
        self._first: LayerCurvature | None = None  # the layer that the model's forward pass reaches first
        self._handles: list[RemovableHandle] = []
        for layer in self._layers:
            _drop_inert_hooks(layer.module)
            hook = _ForwardHook(self, layer)
            self._handles.append(layer.module.register_forward_hook(hook, with_kwargs=True))
        weakref.finalize(self, _remove, self._handles)

    @property
    def loss_terms(self) -> int:
        """N of the backward passes since the last :meth:`discard`: the leading dimension of each one's first layer."""
        return sum(count for _, count in self._terms.values())

    def look_for_first(self) -> None:
        """Have the loss terms counted where some layers want statistics and the first layer does not.

        The first layer's leading dimension stands for the whole model's, also when that layer has stopped or has an
        interval of its own. To be called when layers were armed or disarmed.
        """
        wanted = any(layer.armed and layer.weight.requires_grad for layer in self._layers)
        for layer in self._layers:
            layer.counts = wanted and self._first in (None, layer)

    def discard(self) -> None:
        """Forget what has been gathered, as a step that is not taken must."""
        self._terms.clear()
        self._parents.clear()
        for layer in self._layers:
            layer.forget()

    def remove(self) -> None:
        """Take the hooks off the model."""
        _remove(self._handles)

    def watch(self, layer: LayerCurvature, x: Tensor, output: Any) -> None:
        """Gather a layer's rows when the gradient of its output arrives.

        Args:
            layer: the layer that has just run.
            x: its input.
            output: its output.
        """
        weight = layer.module.weight
        if not (isinstance(output, Tensor) and output.requires_grad and isinstance(weight, Tensor)):
            return
        if not weight.requires_grad:  # frozen
            return
        order = next(self._order)
        outer = _running_backward()  # a forward pass inside a backward pass: activation checkpointing
        x = x.detach()  # shares storage and version counter
        version = x._version
        weight_node = get_gradient_edge(weight).node if weight.is_leaf else None

        def on_gradient(g: Tensor) -> None:
            if not (layer.armed or layer.counts):
                return
            if weight_node is not None and not _accumulates(weight_node):
                return
            if x._version != version:
                raise RuntimeError(
                    f"the input of layer {layer.name!r} was changed in place between forward and backward, so its "
                    f"statistics would be wrong; make the operation that follows the layer's input out of place"
                )
            self._count(layer, order, layer.kind.loss_terms(x), outer)
            if layer.armed:
                layer.gather(x, g)

        output.register_hook(on_gradient)

    def _count(self, layer: LayerCurvature, order: int, terms: int, outer: int) -> None:
        current = _running_backward()
        if outer >= 0 and outer != current:  # a nested backward pass belongs to the one that started it
            self._parents[current] = outer
        while current in self._parents:
            current = self._parents[current]
        if current not in self._terms and layer.rows:
            # A second pass before the step. Were the gradients of the first one dropped, without optimizer.zero_grad()?
            gradient = layer.weight.grad
            if gradient is None or not bool(gradient.any()):
                self.discard()
        first = self._terms.get(current)
        if first is None or order < first[0]:
            self._terms[current] = (order, terms)
            self._first = layer


def _running_backward() -> int:
    """Return the identity of the backward pass this thread is in, -1 outside."""
    return int(torch._C._current_graph_task_id())


def _accumulates(weight_node: Node) -> bool:
    """Return whether the running backward pass adds to the weight's gradient; a gradient penalty's pass does not."""
    try:
        return bool(torch._C._will_engine_execute_node(weight_node))
    except RuntimeError:  # what it says of a leaf under torch.autograd.grad, which fills no .grad
        return False


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _drop_inert_hooks(module: nn.Module) -> None:
    for key in [k for k, hook in module._forward_hooks.items() if hook is inert_hook]:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
