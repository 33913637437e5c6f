"""The gathering of statistics: which layers do so in a step, their rows, and the loss terms.

On a refresh step hooks see the calls of the layers (:mod:`torch_thor.capture.hooks`), and each call
registers a hook on its output. The rows of the call count when the gradient of the output has been
computed. So an evaluation pass, a pass whose loss is never differentiated, and either of the two
forward passes of activation checkpointing add no rows, and the input is kept alive no longer than
autograd keeps it. Layers without G need no gradient: their calls keep the sum of their
rows, or a copy of the input where that is smaller, until the graph is freed.

Rows live until ``step``, until ``optimizer.zero_grad()``, or until the first backward pass after a
step that a GradScaler has skipped.

Which layers gather follows from entries of their state (``due``, ``idle``), which checkpoints
contain. A layer that is due gathers if it is called. It is *awaited*, and a compiled model runs
eagerly for it, unless the loss did not reach it when it was due (idle; a frozen layer is never
reached).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from torch_thor.capture.hooks import ModuleCalls, ModuleHook
from torch_thor.capture.sampling import Mark, Sampler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature, Statistics, with_gradient
from torch_thor.curvature.lifecycle import after_refresh, after_step
from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.torch_internals import (
    backward_id,
    backward_keeps_graph,
    backward_reaches,
    functorch,
    uncompiled,
)

# The number of rows that stand for all where there is no G: this many, and at least so many per
# column of a block. More rows would take time in large batches without improving A.
_ENOUGH_ROWS = 1024
_ROWS_PER_COLUMN = 8


@dataclass
class Pass:
    """The loss terms of one backward pass, by the leading dimensions of the layers' inputs."""

    first: int = 0  # of the layer nearest to the data
    last: int = 0  # of the layer nearest to the loss
    layers: set[Any] = field(default_factory=set)
    repeated: bool = False  # whether it goes through calls that have had a gradient in this step


@dataclass
class _Call:
    """A call of a layer whose output has not received a gradient yet, or may receive another."""

    layer: LayerCurvature
    kind: Kind
    keep: Tensor | None  # which of the rows count; None for all
    weight: Node | None  # the node that adds to the gradient of the weight
    # the backward pass in which the call was made, as activation checkpointing does; -1 outside
    outer: int
    loss_terms: int = 0  # the leading dimension of the input, for a layer with a G
    x: Any = None  # the input, or a copy
    version: int = 0  # of x
    most: int | None = None  # a number of rows that stand for all, for a layer without G
    rows: Statistics | None = None  # its rows, summed, where that is smaller than the input
    mark: Mark | None = None
    step: object = None  # the step of the previous gradient
    gradient: Tensor | None = None  # the sum of those of this step, if another may come


class Capture:
    """Gathers the statistics of all layers."""

    def __init__(self, *, sampled: bool = False) -> None:
        self.sampler = Sampler() if sampled else None
        self.row_mask: Tensor | None = None
        self.layers: list[LayerCurvature] = []
        self.gathering: set[LayerCurvature] = set()
        self.awaited: set[LayerCurvature] = set()
        # whether a GradScaler has taken or skipped the step since the last backward pass
        self.scaler_stepped = False
        self._calls = ModuleCalls(self)
        self.discard()

    def follow(self, hooks: Sequence[ModuleHook]) -> None:
        """Replace the hooks, and keep what has been gathered.

        New layers gather from the next :meth:`listen` on.
        """
        self._hooks = list(hooks)
        self.layers = list(dict.fromkeys(layer for hook in hooks for layer in hook.layers))
        self.gathering.intersection_update(self.layers)
        self.awaited.intersection_update(self.layers)

    def listen(self) -> None:
        """Register the hooks that the layers' states call for, and remove all others."""
        self.gathering = {
            layer
            for layer in self.layers
            # a weight that has a state was trained once: parts of a model may be frozen in turn
            if layer.due and (layer.weight.requires_grad or layer.weight_view.state)
        }
        self.awaited = {layer for layer in self.gathering if not layer.idle}
        self._calls.listen(
            hook
            for hook in self._hooks
            if self.awaited and not self.gathering.isdisjoint(hook.layers)
        )
        if not self.awaited:
            self.discard()

    # ---- rows ------------------------------------------------------------------------------------

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Handle a call of a layer."""
        # the tensors of a transform of torch.func are not those of the training
        if layer not in self.gathering or not torch.is_grad_enabled() or functorch() is not None:
            return
        weight = layer.weight_view.module._parameters.get(layer.weight_view.attribute)
        # pruned since the optimizer was created, or frozen
        if weight is None or not weight.requires_grad:
            return
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        inputs, mask = as_rows(x), self.row_mask
        call = _Call(
            layer,
            kind,
            mask if mask is not None and kind.row_shape(inputs) == mask.shape else None,
            get_gradient_edge(weight).node if weight.is_leaf else None,
            backward_id(),
        )
        if layer.g is not None:
            call.loss_terms = x.size(0) if x.is_nested else kind.loss_terms(inputs)
            call.x, call.version = inputs, inputs._version  # shares storage and version counter
            call.mark = None if self.sampler is None else self.sampler.mark(output)
        else:
            cut = layer.a.layout.block_sizes
            call.most = max(_ENOUGH_ROWS, _ROWS_PER_COLUMN * cut.width)
            if inputs.numel() <= cut.rows * cut.width:
                call.x = inputs.clone()  # of version 0
            else:
                call.rows = Statistics(layer.kind, layer.stored)
                call.rows.gather(kind, inputs, as_rows(output).shape, call.keep, most=call.most)
        output.register_hook(partial(self._on_gradient, call))

    def _on_gradient(self, call: _Call, g: Tensor) -> None:
        """Take the rows of a call, now that the gradient of its output has been computed."""
        layer, sampler = call.layer, self.sampler
        if layer not in self.gathering:
            return
        try:  # whether this backward pass adds to the gradient of the weight
            trains = call.weight is None or backward_reaches(call.weight)
        except RuntimeError:
            # torch.autograd.grad was asked for the gradient of the weight: it is meant for .grad if
            # the call was made inside of a backward pass, as the adjoint of an ODE does
            trains = call.outer >= 0
        if sampler is not None and sampler.running:
            self._count(call, g, empty=sampler.empty)
        elif trains and sampler is not None and call.mark is not None:
            call.mark.trained = sampler.trained = True
        elif trains:
            self._note_pass(call)
            self._count(call, g)

    def _count(self, call: _Call, g: Tensor, *, empty: bool = False) -> None:
        """Add the rows of a call, and of the gradient of its output; none if it is empty."""
        layer, again = call.layer, call.step is self._step
        call.step = self._step
        self.mask_taken |= call.keep is not None
        self.reached.add(layer)
        if again and layer.g is None:
            return
        if call.rows is not None:
            layer.statistics.add(call.rows)
        elif call.x._version != call.version:
            raise RuntimeError(
                f"the input of layer {layer.name!r} was changed in place between forward and "
                "backward, so its statistics would be wrong; make the operation that follows the "
                "layer's input out of place"
            )
        elif not empty:
            # G belongs to the sum of all losses
            before = call.gradient if again else None
            total = as_rows(g) if before is None else as_rows(g) + before
            output = total.shape if layer.g is None else total
            layer.statistics.gather(
                call.kind, call.x, output, call.keep, most=call.most, instead_of=before
            )
            call.gradient = total if layer.g is not None and backward_keeps_graph() else None

    def _note_pass(self, call: _Call) -> None:
        """Note the loss terms of the running backward pass; drop what a skipped step has left."""
        current = backward_id()
        # a nested backward pass belongs to the pass that started it
        if call.outer >= 0 and call.outer != current:
            self._parents[current] = call.outer
        while current in self._parents:
            current = self._parents[current]
        if current not in self.passes:
            if self.scaler_stepped:
                self.discard()
            self.passes[current] = Pass(last=call.loss_terms)
        running = self.passes[current]
        running.first = call.loss_terms
        running.repeated |= call.step is self._step
        running.layers.add(call.layer)

    # ---- the end of a step -----------------------------------------------------------------------

    def finish_refresh(
        self,
        due: Iterable[LayerCurvature],
        events: Iterable[RefreshEvent],
        unseen: Set[LayerCurvature],
    ) -> None:
        """Record what a refresh has decided on each layer, and drop the statistics.

        ``unseen``: the layers with a gradient, of whose calls no backward pass came.
        """
        decisions = {event.layer: event.decision for event in events}
        for layer in due:
            reached = layer in self.reached
            life = after_refresh(
                layer.life,
                decision=decisions.get(layer.name),
                reached=reached,
                without_statistics=layer in unseen & self.awaited,
                has_gradient=reached or layer in unseen,
                has_factors=layer.refreshes > 0,
            )
            layer.record(**vars(life))
        self.discard()

    def finish_step(self) -> bool:
        """Drop a non-refresh step's statistics; return whether it reached idle layers."""
        reached = with_gradient(layer for layer in self.gathering if layer.idle)
        for layer in reached:
            layer.record(**vars(after_step(layer.life, has_gradient=True)))
        self.discard()
        return bool(reached)

    @uncompiled
    def discard(self) -> None:
        """Drop all statistics and loss terms of this step."""
        self._step = object()  # a pass of the next step may go through an earlier graph again
        self.passes: dict[int, Pass] = {}  # by autograd's id of the pass
        self._parents: dict[int, int] = {}  # the id of the outer pass of each nested pass
        # layers that the loss has reached in this step, also without rows
        self.reached: set[LayerCurvature] = set()
        self.mask_taken = False  # whether the mask has fitted the input of a layer in this step
        self.scaler_stepped = False
        if self.sampler is not None:
            self.sampler.reset()
        for layer in self.layers:
            layer.statistics.forget()


def as_rows(tensor: Tensor) -> Tensor:
    """Return an input or the gradient of an output as a dense tensor.

    The sequences of a nested tensor follow each other.
    """
    dense = tensor.detach()
    if dense.is_nested:
        return torch.cat(dense.unbind())
    return dense if dense.layout is torch.strided else dense.to_dense()


def loss_terms_of_step(passes: Collection[Pass]) -> tuple[int, tuple[int, int] | None]:
    """Return N of a step, and (first, last) of a pass in which they differ, or None.

    N is summed over micro-batches, but not over several losses of the same calls.
    """
    totals: Counter[Any] = Counter()
    for each in passes:
        if not each.repeated:
            totals.update(dict.fromkeys(each.layers, each.first))
    differing = next(((p.first, p.last) for p in passes if p.first != p.last), None)
    return max(totals.values(), default=0), differing
