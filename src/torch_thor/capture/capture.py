"""Decides which layers gather statistics in a step, registers the hooks for it, and drops statistics that are not used.

On a refresh step hooks see the calls of the layers (:mod:`torch_thor.capture.module_hooks`). Their rows count when the
backward pass comes (:mod:`torch_thor.capture.backward_pass`), and live until ``step``, until ``optimizer.zero_grad()``,
or until no weight that a loss has reached has a gradient. On all other steps there are no hooks.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_thor.capture.backward_pass import BackwardPasses
from torch_thor.capture.module_calls import module_calls
from torch_thor.capture.module_hooks import ModuleHook
from torch_thor.capture.phases import GATHERING, Phase
from torch_thor.capture.sampling import Sampler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import Decision, RefreshEvent
from torch_thor.torch_internals import inside_functorch


@dataclass(frozen=True)
class Absence:
    """The layers without statistics on a refresh step."""

    idle: Collection[LayerCurvature] = ()  # the layers that the loss has not reached
    uncalled: Collection[LayerCurvature] = ()


class Capture:
    """Gathers the statistics of all layers, and counts the loss terms of the step."""

    def __init__(self, hooks: Sequence[ModuleHook] = (), *, sampled: bool = False) -> None:
        self.sampler = Sampler() if sampled else None
        self.phases: dict[LayerCurvature, Phase] = {}
        self.backward = BackwardPasses(self.sampler)
        self.row_mask: Tensor | None = None
        self.mask_taken = False  # whether the mask has fitted the input of a layer in this step
        self.reached: set[LayerCurvature] = set()  # layers that the loss has reached in this step, also without rows
        self.inside_transform: set[str] = set()  # layers that ran under torch.func, where hooks see no gradient
        self._listening = False
        self.follow(hooks)

    def follow(self, hooks: Sequence[ModuleHook]) -> None:
        """Replace the hooks; statistics that have been gathered stay."""
        self._hooks = list(hooks)
        self.layers = list(dict.fromkeys(layer for hook in hooks for layer in hook.layers))
        self.phases = {layer: self.phases.get(layer, Phase.OPTIONAL) for layer in self.layers}
        self.backward.first = None

    # ---- phases -------------------------------------------------------------------------------------------------

    def phase(self, layer: LayerCurvature) -> Phase:
        """Return the phase of a layer."""
        return self.phases.get(layer, Phase.OFF)

    def gathers(self, layer: LayerCurvature) -> bool:
        """Return whether a layer's statistics are gathered."""
        return self.phases.get(layer) in GATHERING

    @property
    def watching(self) -> bool:
        """Whether statistics of a layer are required in this step; compiled models then run eagerly."""
        return Phase.REQUIRED in self.phases.values()

    @property
    def wanting(self) -> bool:
        """Whether a layer gathers statistics, is not frozen, and is called by its model as far as is known."""
        for layer, phase in self.phases.items():
            # a layer whose phase is REQUIRED is called, but it may have been frozen since
            if phase in GATHERING and layer.weight.requires_grad and (phase is Phase.REQUIRED or not layer.uncalled):
                return True
        return False

    def resume(self) -> None:
        """Derive the phases from the state of the layers: after construction, after loading, or for new layers."""
        for layer in self.phases:
            self.phases[layer] = Phase.OPTIONAL if layer.due else Phase.OFF
        self.listen()

    def want(self, layers: Iterable[LayerCurvature]) -> None:
        """Gather statistics of layers from the next step on; :meth:`listen` must be called next."""
        for layer in layers:
            self._set_due(layer, not layer.stopped)

    def release(self, layer: LayerCurvature) -> None:
        """Gather no more statistics of a layer until :meth:`want`; :meth:`listen` must be called next."""
        self._set_due(layer, False)

    def listen(self) -> None:
        """Register the hooks that the current phases need, and remove all others. Must be called after each change."""
        # If the layer that gives N gathers no statistics while others do, because it has stopped or has another
        # interval, it counts loss terms. As long as that layer is not known, all layers count.
        watching, first = False, self.backward.first
        for layer, phase in self.phases.items():
            if phase in GATHERING:
                # a compiled model runs eagerly for layers that can be reached, and not for idle or uncalled ones
                awaited = layer.weight.requires_grad and not layer.uncalled and not layer.idle
                self.phases[layer] = Phase.REQUIRED if awaited else Phase.OPTIONAL
                watching = watching or awaited
        for layer, phase in self.phases.items():
            if phase not in GATHERING:
                counts = watching and self.sampler is None and first in (None, layer) and "G" in layer.sides
                self.phases[layer] = Phase.COUNTING if counts else Phase.OFF
        if watching or self._listening:
            module_calls.listen(self, self._needed_hooks() if watching else ())
        self._listening = watching

    def remove(self) -> None:
        """Remove all hooks."""
        module_calls.listen(self, ())
        self._listening = False

    def _needed_hooks(self) -> list[ModuleHook]:
        return [
            hook
            for hook in self._hooks
            if any(self.phases[layer] is not Phase.OFF and layer.weight.requires_grad for layer in hook.layers)
        ]

    def _set_due(self, layer: LayerCurvature, due: bool) -> None:
        layer.record(due=due)
        if self.gathers(layer) is not due:
            self.phases[layer] = Phase.OPTIONAL if due else Phase.OFF

    # ---- what has been gathered ---------------------------------------------------------------------------------

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Handle a call of a layer."""
        phase = self.phases.get(layer, Phase.OFF)
        if phase is Phase.OFF or not torch.is_grad_enabled():
            return
        if inside_functorch():
            self.inside_transform.add(layer.name)
            return
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        weight = layer.weight_view.module._parameters.get(layer.weight_view.attribute)
        if weight is None or not weight.requires_grad:  # pruned since THOR was created, or frozen
            return
        if "G" in layer.sides:
            self.backward.watch(self, layer, weight, kind, x, output)
        elif phase in GATHERING:
            self.backward.gather_inputs(self, layer, weight, kind, x, output)

    def gradients_dropped(self) -> bool:
        """Return whether no weight that a loss has reached in this step has a gradient any more."""
        counted = {call.layer for one in self.backward.passes.values() for call in one.calls}
        views = [layer.weight_view for layer in self.reached | counted]
        return all(view.shards is None and view.present is not None and view.present.grad is None for view in views)

    def absence(self, refreshing: Iterable[LayerCurvature], silent: Collection[LayerCurvature]) -> Absence:
        """Find the layers without statistics; must be called before the refresh uses the statistics."""
        without = [layer for layer in refreshing if layer not in self.reached]
        return Absence(
            idle={layer for layer in without if not layer.weight_view.has_gradient()},
            uncalled={layer for layer in without if layer.uncalled} | set(silent),
        )

    def finish_refresh(
        self, refreshing: Iterable[LayerCurvature], events: Iterable[RefreshEvent], absence: Absence
    ) -> None:
        """Stop gathering for the layers that a refresh has decided on."""
        decisions: dict[str, Decision] = {}
        for event in events:
            decisions[event.layer] = event.decision
        for layer in refreshing:
            decision, uncalled = decisions.get(layer.name), layer in absence.uncalled
            due = decision is None or (decision is Decision.FAILED and not layer.refreshes)
            if not due or uncalled:  # an uncalled layer does not wait for statistics
                self.phases[layer] = Phase.OFF
            layer.record(due=due and not uncalled, idle=layer in absence.idle, uncalled=uncalled)
        self.discard()

    def finish_step(self) -> None:
        """Drop the statistics of a step that was no refresh."""
        # Idle layers that the loss has reached in this step are no longer idle, so that the next step can refresh them.
        for layer, phase in self.phases.items():
            if phase in GATHERING and layer.idle:
                layer.record(idle=not layer.weight_view.has_gradient())
        self.discard()

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
        if self._listening and (self.sampler is None or self.sampler.trained):
            self.discard()

    def discard_stale(self) -> None:
        """Drop the statistics of sampled labels if the gradients of their loss have been reset without a step."""
        if self.sampler is not None and self.sampler.trained and self.gradients_dropped():
            self.discard()
