"""Decides which layers gather statistics in a step, registers the hooks for it, and drops statistics that are not used.

On a refresh step hooks see the calls of the layers (:mod:`torch_thor.capture.module_hooks`). Their rows count when the
backward pass comes (:mod:`torch_thor.capture.backward_pass`), and live until ``step``, until ``optimizer.zero_grad()``,
or until no weight that a loss has reached has a gradient. On all other steps there are no hooks.

Which layers gather follows from entries of their state (``due``, ``idle``, ``uncalled``), which checkpoints contain. A
layer that is due gathers if it is called. It is *awaited*, and a compiled model runs eagerly for it, unless it is
frozen, the loss did not reach it when it was due (idle), or its weight is used without calling its module (uncalled).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_thor.capture.backward_pass import BackwardPasses
from torch_thor.capture.module_calls import module_calls
from torch_thor.capture.module_hooks import ModuleHook
from torch_thor.capture.sampling import Sampler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import Decision, RefreshEvent
from torch_thor.torch_internals import inside_functorch


class Capture:
    """Gathers the statistics of all layers, and counts the loss terms of the step."""

    def __init__(self, hooks: Sequence[ModuleHook] = (), *, sampled: bool = False) -> None:
        self.sampler = Sampler() if sampled else None
        self.backward = BackwardPasses(self.sampler)
        self.row_mask: Tensor | None = None
        self.mask_taken = False  # whether the mask has fitted the input of a layer in this step
        self.reached: set[LayerCurvature] = set()  # layers that the loss has reached in this step, also without rows
        self.inside_transform: set[str] = set()  # layers that ran under torch.func, where hooks see no gradient
        self.gathering: set[LayerCurvature] = set()
        self.awaited: set[LayerCurvature] = set()
        self.follow(hooks)

    def follow(self, hooks: Sequence[ModuleHook]) -> None:
        """Replace the hooks; what has been gathered stays, and new layers gather from the next :meth:`listen` on."""
        self._hooks = list(hooks)
        self.layers = list(dict.fromkeys(layer for hook in hooks for layer in hook.layers))
        self.gathering.intersection_update(self.layers)
        self.awaited.intersection_update(self.layers)

    # ---- which layers gather --------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Register the hooks that the layers' states call for, and remove all others."""
        self.gathering = {layer for layer in self.layers if layer.due and layer.weight.requires_grad}
        self.awaited = {layer for layer in self.gathering if not layer.uncalled and not layer.idle}
        needed = [hook for hook in self._hooks if not self.gathering.isdisjoint(hook.layers)] if self.awaited else ()
        module_calls.listen(self, needed)

    def remove(self) -> None:
        """Remove all hooks."""
        module_calls.listen(self, ())

    # ---- what has been gathered -----------------------------------------------------------------------------------

    def gathers(self, layer: LayerCurvature) -> bool:
        """Return whether a layer's statistics are gathered."""
        return layer in self.gathering

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Handle a call of a layer."""
        if layer not in self.gathering or not torch.is_grad_enabled():
            return
        if inside_functorch():
            self.inside_transform.add(layer.name)
            return
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        weight = layer.weight_view.module._parameters.get(layer.weight_view.attribute)
        if weight is None or not weight.requires_grad:  # pruned since the optimizer was created, or frozen
            return
        gather = self.backward.watch if "G" in layer.sides else self.backward.gather_inputs
        gather(self, layer, weight, kind, x, output)

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
        self.backward.forget()
        self.reached.clear()
        self.inside_transform.clear()
        self.mask_taken = False
        if self.sampler is not None:
            self.sampler.reset()
        for layer in self.layers:
            layer.statistics.forget()

    def discard_with_gradients(self) -> None:
        """Drop the statistics of passes whose gradients are about to be reset."""
        if self.awaited and (self.sampler is None or self.sampler.trained):
            self.discard()

    def discard_stale(self) -> None:
        """Drop the statistics of sampled labels if the gradients of their loss have been reset without a step."""
        if self.sampler is not None and self.sampler.trained and self.gradients_dropped():
            self.discard()
