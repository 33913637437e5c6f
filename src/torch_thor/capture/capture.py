"""Which layers gather statistics, from when on, and when what they have gathered is forgotten.

On a refresh step the call of each layer that gathers is seen (:mod:`torch_thor.capture.module_hooks`). Its rows come in
the backward pass (:mod:`torch_thor.capture.backward_pass`) or, where A alone is gathered, in the forward pass
(:mod:`torch_thor.capture.forward_pass`). On all other steps there is no hook at all.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_thor.capture.backward_pass import BackwardPasses
from torch_thor.capture.forward_pass import ForwardPasses, InputPhase
from torch_thor.capture.module_calls import module_calls
from torch_thor.capture.module_hooks import ModuleHook
from torch_thor.capture.phases import GATHERING, Phase
from torch_thor.capture.sampling import Sampler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import Decision, RefreshEvent


@dataclass(frozen=True)
class Absence:
    """Which layers had no statistics on a refresh step.

    Args:
        idle: those that no loss has reached.
        uncalled: those whose weights have a gradient, and which are not called.
    """

    idle: Collection[LayerCurvature] = ()
    uncalled: Collection[LayerCurvature] = ()


class Capture:
    """Gathers the statistics of all layers, and counts the loss terms of the step.

    Each layer is in one :class:`Phase`, which only the methods here change: :meth:`resume` derives it from the state,
    :meth:`want` begins gathering, :meth:`finish_refresh` ends it, and :meth:`listen` decides which statistics are
    required and which layers count loss terms, and registers the hooks that this takes.

    Args:
        hooks: the modules whose calls give rows, and the layers they give them to.
        sampled: whether rows come from the backward passes of sampled labels, not from those of the training loss.
    """

    def __init__(self, hooks: Sequence[ModuleHook] = (), *, sampled: bool = False) -> None:
        self.sampler = Sampler() if sampled else None
        self.phases: dict[LayerCurvature, Phase] = {}
        self.backward = BackwardPasses(self.sampler)
        self.forward = ForwardPasses()
        self.row_mask: Tensor | None = None
        self.mask_taken = False  # whether some layer's rows have been of the shape of the mask
        self.reached: set[LayerCurvature] = set()  # layers whose calls came in this step, with or without rows
        self.inside_transform: set[str] = set()  # layers that ran under torch.func, where no hook sees a gradient
        self._listening = False
        self.follow(hooks)

    def follow(self, hooks: Sequence[ModuleHook]) -> None:
        """Gather from other modules from now on; what has been gathered stays.

        Args:
            hooks: the modules whose calls give rows, and the layers they give them to.
        """
        self._hooks = list(hooks)
        self.layers = list(dict.fromkeys(layer for hook in hooks for layer in hook.layers))
        self.phases = {layer: self.phases.get(layer, Phase.OPTIONAL) for layer in self.layers}
        self.backward.first = None

    # ---- phases -------------------------------------------------------------------------------------------------

    def phase(self, layer: LayerCurvature) -> Phase:
        """Return what a layer's calls are used for.

        Args:
            layer: the layer.

        Returns:
            Its phase; OFF for one that is not among those that are followed.
        """
        return self.phases.get(layer, Phase.OFF)

    def gathers(self, layer: LayerCurvature) -> bool:
        """Return whether a layer's statistics are gathered.

        Args:
            layer: the layer.

        Returns:
            Whether they are.
        """
        return self.phases.get(layer) in GATHERING

    @property
    def watching(self) -> bool:
        """Whether this step's passes are run so that statistics must come: those of all layers, and the loss terms."""
        return Phase.REQUIRED in self.phases.values()

    @property
    def wanting(self) -> bool:
        """Whether statistics of some layer are wanted and can come, as the model stands now."""
        for layer, phase in self.phases.items():
            # what is required was called when that was found; it may have been frozen since
            if phase in GATHERING and layer.weight.requires_grad and (phase is Phase.REQUIRED or not layer.uncalled):
                return True
        return False

    def resume(self) -> None:
        """Go on from what the layers' state says: after construction, after loading, or with other layers."""
        for layer in self.phases:
            self.phases[layer] = Phase.OPTIONAL if layer.due else Phase.OFF
        self.listen()

    def want(self, layers: Iterable[LayerCurvature]) -> None:
        """Have statistics gathered from the next step on; :meth:`listen` must follow.

        Args:
            layers: those that are due, but for those that have stopped, which stay so.
        """
        for layer in layers:
            self._set_due(layer, not layer.stopped)

    def release(self, layer: LayerCurvature) -> None:
        """Gather no more statistics of a layer until it is wanted again; :meth:`listen` must follow.

        Args:
            layer: the layer.
        """
        self._set_due(layer, False)

    def listen(self) -> None:
        """Register hooks where statistics are wanted, and nowhere else; to be called when phases have changed.

        Loss terms are counted where some layers want statistics and the first layer does not: it stands for the whole
        model, also when it has stopped or has an interval of its own.
        """
        watching, first = False, self.backward.first
        for layer, phase in self.phases.items():
            if phase in GATHERING:
                # a layer that no loss has reached, or that is not called, does not keep the model from running compiled
                awaited = layer.weight.requires_grad and not layer.uncalled and not layer.idle
                self.phases[layer] = Phase.REQUIRED if awaited else Phase.OPTIONAL
                watching = watching or awaited
        for layer, phase in self.phases.items():
            if phase not in GATHERING:
                counts = watching and self.sampler is None and first in (None, layer) and "G" in layer.sides
                self.phases[layer] = Phase.COUNTING if counts else Phase.OFF
        if watching or self._listening:
            module_calls.listen(self, self._of_use() if watching else ())
        self._listening = watching

    def remove(self) -> None:
        """Remove all hooks."""
        module_calls.listen(self, ())
        self._listening = False

    def _of_use(self) -> list[ModuleHook]:
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
        """Take note of the call of a layer.

        Args:
            layer: the layer.
            kind: the geometry of the module that has just run.
            x: its input.
            output: its output.
        """
        phase = self.phases.get(layer, Phase.OFF)
        if phase is Phase.OFF or not torch.is_grad_enabled():
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.inside_transform.add(layer.name)
            return
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        weight = layer.weight_view.module._parameters.get(layer.weight_view.attribute)
        if weight is None or not weight.requires_grad:  # pruned since THOR was made; frozen
            return
        if "G" in layer.sides:
            self.backward.watch(self, layer, kind, x, output)
        elif phase in GATHERING:
            self.forward.gather(self, layer, kind, x, output)

    def gradients_dropped(self) -> bool:
        """Return whether no gradient is left of the passes so far.

        One layer does not tell: its gradient is zero where a gain behind it is, or where a whole micro-batch is masked.
        Zeros in all layers are dropped gradients where the rows had others (``model.zero_grad(set_to_none=False)``).

        Returns:
            Whether it was reset after the passes (a host–device synchronisation per layer).
        """
        reached = [layer for layer in self.layers if layer in self.reached]
        if any(layer.weight_view.has_gradient() for layer in reached):
            return False
        cleared = all(layer.weight.grad is None for layer in reached)
        return cleared or any(layer.statistics.have_gradients() for layer in reached)

    def absence(self, refreshing: Iterable[LayerCurvature], silent: Collection[LayerCurvature]) -> Absence:
        """Find the layers without statistics, before these are used up.

        Args:
            refreshing: the layers that are due.
            silent: those of them that have been found to have a gradient and no statistics.

        Returns:
            Which are idle, and which are not called (a host–device synchronisation for each without statistics).
        """
        without = [layer for layer in refreshing if layer not in self.reached]
        return Absence(
            idle={layer for layer in without if not layer.weight_view.has_gradient()},
            uncalled={layer for layer in without if layer.uncalled} | set(silent),
        )

    def finish_refresh(
        self, refreshing: Iterable[LayerCurvature], events: Iterable[RefreshEvent], absence: Absence
    ) -> None:
        """Gather no more of the layers that a refresh has decided on; a step without factors at all tries again.

        Args:
            refreshing: the layers that were due; those without an event stay so.
            events: what was decided.
            absence: which of them had no statistics.
        """
        decisions: dict[str, Decision] = {}
        for event in events:
            decisions[event.layer] = event.decision
        for layer in refreshing:
            decision, uncalled = decisions.get(layer.name), layer in absence.uncalled
            due = decision is None or (decision is Decision.FAILED and not layer.refreshes)
            if not due or uncalled:  # statistics of a layer that is not called are not waited for
                self.phases[layer] = Phase.OFF
            layer.record(due=due and not uncalled, idle=layer in absence.idle, uncalled=uncalled)
        self.discard()

    def finish_step(self) -> None:
        """Drop the statistics of a step that was no refresh.

        From the next step on, the layers that no loss had reached until this one are waited for, loss terms with them.
        """
        for layer, phase in self.phases.items():
            if phase in GATHERING and layer.idle:
                layer.record(idle=not layer.weight_view.has_gradient())
        self.discard()

    def discard(self) -> None:
        """Forget what has been gathered, as a step that is not taken must."""
        if self.backward.passes:
            self.backward.forget()
        if self.forward.phase is not InputPhase.NONE:
            self.forward.forget()
        self.reached.clear()
        self.inside_transform.clear()
        self.mask_taken = False
        if self.sampler is not None:
            self.sampler.reset()
        for layer in self.layers:
            layer.statistics.forget()

    def discard_with_gradients(self) -> None:
        """Forget what has been gathered, as the gradients of the same passes are dropped.

        What belongs to a loss whose own pass is still to come stays (sampled labels; inputs, where they are all that is
        gathered): many loops call ``zero_grad`` between the forward pass and ``loss.backward()``.
        """
        if not (self.reached or self.backward.passes or self.inside_transform or self.sampler is not None):
            return  # nothing has been gathered, as on every ordinary step
        if self.forward.before_reset(self.layers):
            return
        if self.sampler is None or self.sampler.trained:
            self.discard()

    def note_gradients(self) -> None:
        """Take note that gradients have been reset, where inputs wait for the backward pass to come."""
        self.forward.after_reset(self.layers)

    def discard_stale(self) -> None:
        """Forget sampled labels whose loss has been differentiated and left no gradient: dropped without a step."""
        if self.sampler is not None and self.sampler.trained and self.gradients_dropped():
            self.discard()
