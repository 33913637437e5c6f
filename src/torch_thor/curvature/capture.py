"""Where rows come from: on refresh steps a forward hook a layer, which hangs a hook on the gradient of its output.

Between refreshes there is no hook at all. On a refresh step the output's hook gets both rows at once: so an evaluation
pass, a pass whose loss is never differentiated, and the first of the two passes of activation checkpointing leave
nothing behind, and the input is kept alive no longer than autograd keeps it anyway.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from torch_thor.curvature.eager import eager_window
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.sources import Source, remove


class Capture:
    """Gathers the statistics of all layers, and counts the loss terms of the step.

    Args:
        sources: the modules whose calls give rows, and the layers they give them to.
    """

    def __init__(self, sources: Sequence[Source] = ()) -> None:
        self._sources = list(sources)
        self._layers = list(dict.fromkeys(layer for source in sources for layer in source.layers))
        self._order = itertools.count()
        # backward pass -> (order of its first layer in the forward pass, leading dimension of that layer's input)
        self._terms: dict[int, tuple[int, int]] = {}
        self._parents: dict[int, int] = {}
        self._first: LayerCurvature | None = None  # the layer that the model's forward pass reaches first
        self.row_mask: Tensor | None = None
        self.mask_taken = False  # whether some layer's rows have been of the shape of the mask
        self.inside_transform: set[str] = set()  # layers that ran under torch.func, where no hook sees a gradient
        for source in sources:
            source.clean()
        # handles alone: what a finalizer holds lives on, and a source leads to the optimizer
        weakref.finalize(self, _remove, [source.handles for source in sources])

    @property
    def loss_terms(self) -> int:
        """N of the backward passes since the last :meth:`discard`: the leading dimension of each one's first layer."""
        return sum(count for _, count in self._terms.values())

    @property
    def watching(self) -> bool:
        """Whether this step's passes are run so that statistics must come: those of all layers, and the loss terms."""
        return any(layer.watched for layer in self._layers)

    def attach(self) -> None:
        """Put hooks where statistics are wanted, and take them off everywhere else.

        Loss terms are counted where some layers want statistics and the first layer does not: its leading dimension
        stands for the whole model's, also when it has stopped or has an interval of its own. To be called when layers
        were armed or disarmed.
        """
        for layer in self._layers:
            # a layer that no loss has reached keeps nobody from running compiled
            layer.watched = layer.armed and not layer.idle and layer.weight.requires_grad
        wanted = self.watching
        for layer in self._layers:
            layer.counts = wanted and self._first in (None, layer)
        for source in self._sources:
            of_use = (layer.counts or (layer.armed and layer.weight.requires_grad) for layer in source.layers)
            source.attach(self, wanted and any(of_use))
        eager_window.hold(self, wanted)

    def notice_reached(self) -> None:
        """Watch from the next step on, loss terms with them, the layers that no loss had reached until this step."""
        for layer in self._layers:
            if layer.armed and layer.idle:
                layer.set_idle(not layer.has_gradient())

    def discard(self) -> None:
        """Forget what has been gathered, as a step that is not taken must."""
        self._terms.clear()
        self._parents.clear()
        self.inside_transform.clear()
        self.mask_taken = False
        for layer in self._layers:
            layer.forget()

    def remove(self) -> None:
        """Take the hooks off the model."""
        _remove([source.handles for source in self._sources])
        eager_window.hold(self, False)

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Gather a layer's rows when the gradient of its output arrives.

        Args:
            layer: the layer.
            kind: the geometry of the module that has just run.
            x: its input.
            output: its output.
        """
        if not (layer.armed or layer.counts) or not torch.is_grad_enabled():
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.inside_transform.add(layer.name)
            return
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        weight = getattr(layer.weight_piece.module, layer.weight_piece.attribute)
        if not weight.requires_grad:  # frozen
            return
        order = next(self._order)
        outer = _running_backward()  # a forward pass inside a backward pass: activation checkpointing
        x = x.detach()  # shares storage and version counter
        version = x._version
        weight_node = get_gradient_edge(weight).node if weight.is_leaf else None
        mask = self.row_mask

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
            self._count(layer, order, kind.loss_terms(x), outer)
            if layer.armed:
                keep = mask if mask is not None and kind.row_shape(x) == mask.shape else None
                self.mask_taken |= keep is not None
                layer.gather(kind, x, g, keep)

        output.register_hook(on_gradient)

    def _count(self, layer: LayerCurvature, order: int, terms: int, outer: int) -> None:
        current = _running_backward()
        if outer >= 0 and outer != current:  # a nested backward pass belongs to the one that started it
            self._parents[current] = outer
        while current in self._parents:
            current = self._parents[current]
        # A second pass before the step. Were the gradients of the first one dropped, without optimizer.zero_grad()?
        if current not in self._terms and layer.seen and not layer.has_gradient():
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


def _remove(handles: list[list[RemovableHandle]]) -> None:
    for of_source in handles:
        remove(of_source)
