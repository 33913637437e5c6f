"""Decides which layers gather statistics in a step, gathers their rows, and counts the loss terms of its losses.

On a refresh step hooks see the calls of the layers (:mod:`torch_thor.capture.hooks`), and each call registers a hook on
its output. When the gradient of the output has been computed, that adds the rows of both input and gradient. So an
evaluation pass, a pass whose loss is never differentiated, and the first of the two forward passes of activation
checkpointing add no rows, and the input is kept alive no longer than autograd keeps it. Layers that have A alone need
no gradient: their rows are summed in the forward pass, so that no input is kept alive, and the hook adds the sum.

Rows live until ``step``, until ``optimizer.zero_grad()``, or until no weight that a loss has reached has a gradient.

Which layers gather follows from entries of their state (``due``, ``idle``, ``uncalled``), which checkpoints contain. A
layer that is due gathers if it is called. It is *awaited*, and a compiled model runs eagerly for it, unless it is
frozen, the loss did not reach it when it was due (idle), or its weight is used without calling its module (uncalled).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from torch_thor.capture.hooks import ModuleCalls, ModuleHook
from torch_thor.capture.loss_terms import Call, Pass
from torch_thor.capture.sampling import Sampler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature, Statistics
from torch_thor.curvature.refresh import Decision, RefreshEvent
from torch_thor.torch_internals import backward_id, backward_keeps_graph, backward_reaches, functorch, saved_hooks

# The number of rows that is enough for A alone: this many, and at least so many for each column of a block. More rows
# would take time in large batches without improving A.
_ENOUGH_ROWS = 1024
_ROWS_PER_COLUMN = 8


@dataclass
class _Waiting:
    """The rows of the calls of a layer since the last backward pass, which count together when the next one comes."""

    rows: Statistics
    masked: bool = False  # whether the mask has fitted one of the inputs
    counted: int = -1  # the generation in which they have been counted


class Capture:
    """Gathers the statistics of all layers."""

    def __init__(self, *, sampled: bool = False) -> None:
        self.sampler = Sampler() if sampled else None
        self.row_mask: Tensor | None = None
        self.mask_taken = False  # whether the mask has fitted the input of a layer in this step
        self.reached: set[LayerCurvature] = set()  # layers that the loss has reached in this step, also without rows
        self.inside_transform: set[str] = set()  # layers that ran under torch.func, where hooks see no gradient
        self.gathering: set[LayerCurvature] = set()
        self.awaited: set[LayerCurvature] = set()
        self.passes: dict[int, Pass] = {}  # by autograd's id of the pass
        self._parents: dict[int, int] = {}  # the id of the outer pass of each nested one
        self._waiting: dict[LayerCurvature, _Waiting] = {}
        self._generation = 0  # counts calls of discard(), after which a pass may go through an earlier graph again
        self._calls = ModuleCalls(self)

    def follow(self, model: nn.Module, hooks: Sequence[ModuleHook]) -> None:
        """Replace the hooks; what has been gathered stays, and new layers gather from the next :meth:`listen` on."""
        self._model, self._hooks = model, list(hooks)
        self.layers = list(dict.fromkeys(layer for hook in hooks for layer in hook.layers))
        self.gathering.intersection_update(self.layers)
        self.awaited.intersection_update(self.layers)

    def listen(self, *, unseen: bool = False) -> None:
        """Register the hooks that the layers' states call for, and remove all others."""
        self.gathering = {layer for layer in self.layers if layer.due and layer.weight.requires_grad}
        self.awaited = {layer for layer in self.gathering if not layer.uncalled and not layer.idle}
        needed = [hook for hook in self._hooks if not self.gathering.isdisjoint(hook.layers)] if self.awaited else ()
        self._calls.listen(self._model, needed, unseen=unseen)

    # ---- rows -----------------------------------------------------------------------------------------------------

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Handle a call of a layer."""
        if layer not in self.gathering or not torch.is_grad_enabled():
            return
        if functorch() is not None:
            self.inside_transform.add(layer.name)
            return
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        weight = layer.weight_view.module._parameters.get(layer.weight_view.attribute)
        if weight is None or not weight.requires_grad:  # pruned since the optimizer was created, or frozen
            return
        weight_node = get_gradient_edge(weight).node if weight.is_leaf else None
        mask = self.row_mask
        keep = mask if mask is not None and kind.row_shape(x) == mask.shape else None
        watch = self._watch_gradient if "G" in layer.sides else self._watch_inputs
        watch(layer, weight_node, kind, x, output, keep)

    def _watch_gradient(
        self, layer: LayerCurvature, weight: Node | None, kind: Kind, x: Tensor, output: Tensor, keep: Tensor | None
    ) -> None:
        """Gather a layer's rows when the gradient of its output has been computed."""
        sampler = self.sampler
        # at least 0 in a forward pass inside a backward pass, which activation checkpointing runs
        outer = backward_id()
        x = x.detach()  # shares storage and version counter
        version = x._version
        mark = sampler.mark(output) if sampler is not None else None
        earlier: tuple[int, Tensor | None] = -1, None  # the generation of the previous gradient of this call, and it

        def on_gradient(g: Tensor) -> None:
            nonlocal earlier
            sampled = sampler is not None and sampler.running  # such a pass adds to no gradient of a weight
            if layer not in self.gathering or not (sampled or _accumulates(weight)):
                return
            if sampler is not None and mark is not None and not sampled:
                mark.trained = sampler.trained = True
                return
            if x._version != version:
                raise RuntimeError(
                    f"the input of layer {layer.name!r} was changed in place between forward and backward, so its "
                    f"statistics would be wrong; make the operation that follows the layer's input out of place"
                )
            before, again, total = None, False, g
            if sampler is None:
                into = self._running_pass(outer)
                again = earlier[0] == self._generation
                before = earlier[1] if again else None
                into.repeated |= again
                total = g.detach() if before is None else g.detach() + before
                # kept if another pass may follow (retain_graph), because G is that of the sum of all losses
                earlier = self._generation, total if backward_keeps_graph() else None
                row_shape = kind.row_shape(x)
                # no row_shape: rows are patches, as in a convolution; registered kinds may lack batch_first
                certain = not row_shape or bool(getattr(kind, "batch_first", False))
                into.calls.append(Call(layer, kind.loss_terms(x), tuple(row_shape), certain, kind.diagonal_input))
            self.mask_taken |= keep is not None
            self.reached.add(layer)
            if sampler is None or not sampler.empty:
                layer.statistics.gather(kind, x, total, keep, instead_of=before)

        output.register_hook(on_gradient)

    def _watch_inputs(
        self, layer: LayerCurvature, weight: Node | None, kind: Kind, x: Tensor, output: Tensor, keep: Tensor | None
    ) -> None:
        """Sum the rows of a layer that has A alone; they count once the gradient of its output has been computed."""
        outer = backward_id()
        if outer >= 0 and saved_hooks(True) is not None:
            return  # recomputed by a non-reentrant checkpoint, whose first pass had gradients enabled and was counted
        if layer not in self._waiting:
            self._waiting[layer] = _Waiting(Statistics(layer.kind, layer.weight_view, layer.stored))
        waiting = self._waiting[layer]
        waiting.masked |= keep is not None
        enough = max(_ENOUGH_ROWS, _ROWS_PER_COLUMN * layer.stored[0].cut.width)
        waiting.rows.gather_inputs(kind, x, output.shape, keep, enough)

        def on_gradient(_: Tensor) -> None:
            if layer not in self.gathering or not _accumulates(weight):
                return
            self._waiting.clear()  # later calls wait for another backward pass
            self._running_pass(outer)
            if waiting.counted != self._generation:
                waiting.counted = self._generation
                self.mask_taken |= waiting.masked
                self.reached.add(layer)
                layer.statistics.add(waiting.rows)

        output.register_hook(on_gradient)

    def _running_pass(self, outer: int) -> Pass:
        """Return the backward pass that is running, and forget earlier ones whose gradients have been dropped."""
        current = backward_id()
        if outer >= 0 and outer != current:  # a nested backward pass belongs to the one that started it
            self._parents[current] = outer
        while current in self._parents:
            current = self._parents[current]
        if current not in self.passes:
            if self.passes and self.gradients_dropped():  # by model.zero_grad(), for example
                self.discard()
            self.passes[current] = Pass()
        return self.passes[current]

    # ---- the end of a step ----------------------------------------------------------------------------------------

    def gradients_dropped(self) -> bool:
        """Return whether no weight that a loss has reached in this step has a gradient any more."""
        views = [layer.weight_view for layer in self.reached]
        return all(view.shards is None and view.present is not None and view.present.grad is None for view in views)

    def finish_refresh(
        self, due: Iterable[LayerCurvature], events: Iterable[RefreshEvent], silent: Collection[LayerCurvature]
    ) -> None:
        """Record what a refresh has decided on each layer, and drop the statistics.

        ``silent`` are the layers with a gradient and without statistics: their weights are used without calling them.
        """
        decisions = {event.layer: event.decision for event in events}
        for layer in due:
            decision = decisions.get(layer.name)
            without = layer not in self.reached
            uncalled = layer in silent or (without and layer.uncalled)
            waits = decision is None or (decision is Decision.FAILED and not layer.refreshes)
            layer.record(
                due=waits and not uncalled,
                idle=without and not layer.weight_view.has_gradient(),
                uncalled=uncalled,
            )
        self.discard()

    def finish_step(self) -> bool:
        """Drop the statistics of a step that was no refresh, and return whether an idle layer has been reached."""
        found = False
        for layer in self.gathering:
            if layer.idle and layer.weight_view.has_gradient():
                layer.record(idle=False)
                found = True
        self.discard()
        return found

    def discard(self) -> None:
        """Drop all statistics and loss terms of this step."""
        self.passes.clear()
        self._parents.clear()
        self._waiting.clear()
        self._generation += 1
        self.reached.clear()
        self.inside_transform.clear()
        self.mask_taken = False
        if self.sampler is not None:
            self.sampler.reset()
        for layer in self.layers:
            layer.statistics.forget()

    def discard_with_gradients(self) -> None:
        """Drop the statistics of passes whose gradients are about to be reset."""
        if self.sampler is None or self.sampler.trained:
            self.discard()


def _accumulates(weight: Node | None) -> bool:
    """Return whether the running backward pass adds to the weight's gradient; a gradient penalty's pass does not."""
    try:
        return weight is None or backward_reaches(weight)
    except RuntimeError:  # raised for a leaf under torch.autograd.grad, which adds to no .grad
        return False
