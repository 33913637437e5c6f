"""Gathers the statistics of layers: decides which layers gather, and adds up their rows.

On a refresh step the call of each layer that gathers is seen (:mod:`torch_thor.capture.module_hooks`) and registers a
hook on its output. When the gradient of the output arrives, the hook has both input and gradient and adds their rows.
So an evaluation pass, a pass whose loss is never differentiated, and the first of the two passes of activation
checkpointing leave nothing behind, and the input is kept alive no longer than autograd keeps it anyway. Where A alone
is gathered, its rows are added in the forward pass, and there is no hook on any gradient. On all other steps there is
no hook at all.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from torch_thor.capture.eager import eager_window
from torch_thor.capture.loss_terms import Call, Pass, loss_terms_of_pass, loss_terms_of_step
from torch_thor.capture.module_calls import module_calls
from torch_thor.capture.module_hooks import ModuleHook
from torch_thor.capture.phases import GatheredInputs, Phase
from torch_thor.capture.sampling import Sampler
from torch_thor.curvature.kinds import Kind, ProjectionKind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import Decision, RefreshEvent

# Where A alone is gathered, rows that are enough for it: statistics are what large batches would pay for.
_ENOUGH_ROWS = 1024
_ROWS_A_COLUMN = 8  # and as many for each column of a block


@dataclass(frozen=True)
class Absence:
    """Which layers had no statistics on a refresh step.

    Args:
        idle: those that no loss has reached.
        uncalled: those whose weights have a gradient, and which are not called.
    """

    idle: Collection[LayerCurvature] = ()
    uncalled: Collection[LayerCurvature] = ()


_GATHERING = (Phase.OPTIONAL, Phase.REQUIRED)


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
        self._phases: dict[LayerCurvature, Phase] = {}
        self._passes: dict[int, Pass] = {}  # by backward pass
        self._parents: dict[int, int] = {}
        self._generation = 0  # of what is gathered: a pass that has been forgotten may go through its graph again
        self._inputs = GatheredInputs()
        self.row_mask: Tensor | None = None
        self.mask_taken = False  # whether some layer's rows have been of the shape of the mask
        self.reached: set[LayerCurvature] = set()  # layers whose calls came in this step, with or without rows
        self.inside_transform: set[str] = set()  # layers that ran under torch.func, where no hook sees a gradient
        self.follow(hooks)

    def follow(self, hooks: Sequence[ModuleHook]) -> None:
        """Gather from other modules from now on; what has been gathered stays.

        Args:
            hooks: the modules whose calls give rows, and the layers they give them to.
        """
        self._hooks = list(hooks)
        self._layers = list(dict.fromkeys(layer for hook in hooks for layer in hook.layers))
        self._phases = {layer: self._phases.get(layer, Phase.OPTIONAL) for layer in self._layers}
        self._first: LayerCurvature | None = None  # the layer nearest to the input that knows N

    # ---- phases -------------------------------------------------------------------------------------------------

    def phase(self, layer: LayerCurvature) -> Phase:
        """Return what a layer's calls are used for.

        Args:
            layer: the layer.

        Returns:
            Its phase; OFF for one that is not among those that are followed.
        """
        return self._phases.get(layer, Phase.OFF)

    def gathers(self, layer: LayerCurvature) -> bool:
        """Return whether a layer's statistics are gathered.

        Args:
            layer: the layer.

        Returns:
            Whether they are.
        """
        return self.phase(layer).gathers

    @property
    def watching(self) -> bool:
        """Whether this step's passes are run so that statistics must come: those of all layers, and the loss terms."""
        return Phase.REQUIRED in self._phases.values()

    @property
    def wanting(self) -> bool:
        """Whether statistics of some layer are wanted and can come, as the model stands now."""
        return any(
            phase in _GATHERING and layer.weight.requires_grad and not layer.uncalled
            for layer, phase in self._phases.items()
        )

    def resume(self) -> None:
        """Go on from what the layers' state says: after construction, after loading, or with other layers."""
        for layer in self._layers:
            self._phases[layer] = Phase.of(due=layer.due, awaited=False, counts=False)
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
        due = [layer for layer in self._layers if self.gathers(layer)]
        for layer in due:
            # a layer that no loss has reached, or that is not called, keeps nobody from running compiled
            awaited = self._can_come(layer) and not layer.idle
            self._phases[layer] = Phase.of(due=True, awaited=awaited, counts=False)
        watching = self.watching
        for layer in self._layers:
            if not self.gathers(layer):
                self._phases[layer] = Phase.of(due=False, awaited=False, counts=watching and self._counts(layer))
        module_calls.listen(self, self._of_use() if watching else ())
        eager_window.hold(self, watching)

    def absence(self, refreshing: Iterable[LayerCurvature], silent: Collection[LayerCurvature]) -> Absence:
        """Find the layers without statistics, before these are used up.

        Args:
            refreshing: the layers that are due.
            silent: those of them that have been found to have a gradient and no statistics.

        Returns:
            Which are idle, and which are not called (a wait for the device for each without statistics).
        """
        without = [layer for layer in refreshing if layer not in self.reached]
        return Absence(
            idle={layer for layer in without if not layer.has_gradient()},
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
        decisions = {event.layer: event.decision for event in events}
        for layer in refreshing:
            if layer.name in decisions:
                self._set_due(layer, decisions[layer.name] is Decision.FAILED and not layer.refreshes)
            layer.record(idle=layer in absence.idle, uncalled=layer in absence.uncalled)
            if layer.uncalled:  # nobody waits for it
                self._set_due(layer, False)
        self.discard()

    def finish_step(self) -> None:
        """Drop the statistics of a step that was no refresh.

        From the next step on, the layers that no loss had reached until this one are waited for, loss terms with them.
        """
        for layer in self._layers:
            if self.gathers(layer) and layer.idle:
                layer.record(idle=not layer.has_gradient())
        self.discard()

    def _set_due(self, layer: LayerCurvature, due: bool) -> None:
        layer.record(due=due)
        if self.gathers(layer) is not due:
            self._phases[layer] = Phase.of(due=due, awaited=False, counts=False)

    def _can_come(self, layer: LayerCurvature) -> bool:
        """Return whether statistics are gathered and can come: the weight is trained, and the layer is called."""
        return self.gathers(layer) and layer.weight.requires_grad and not layer.uncalled

    def _counts(self, layer: LayerCurvature) -> bool:
        return self.sampler is None and self._first in (None, layer) and "G" in layer.sides

    def _of_use(self) -> list[ModuleHook]:
        return [
            hook
            for hook in self._hooks
            if any(self.phase(layer) is not Phase.OFF and layer.weight.requires_grad for layer in hook.layers)
        ]

    # ---- what has been gathered ---------------------------------------------------------------------------------

    @property
    def loss_terms(self) -> int:
        """N of the backward passes since the last :meth:`discard` (:mod:`torch_thor.capture.loss_terms`).

        Where labels are sampled, the number of labels.
        """
        if self.sampler is not None:
            return self.sampler.terms
        return loss_terms_of_step(self._passes.values())

    @property
    def doubtful_terms(self) -> tuple[int, int] | None:
        """N of a backward pass and what its last layer saw, where that is another number; None if all is well.

        Only while all layers count: those that are left when others have stopped say less.
        """
        for one in self._passes.values() if self._first is None else ():
            found = loss_terms_of_pass(one.calls)
            if found.number != found.last:
                return found.number, found.last
        return None

    def discard(self) -> None:
        """Forget what has been gathered, as a step that is not taken must."""
        self._remember_first()
        self._passes.clear()
        self._parents.clear()
        self._generation += 1
        self._inputs.forget()
        self.reached.clear()
        self.inside_transform.clear()
        self.mask_taken = False
        if self.sampler is not None:
            self.sampler.reset()
        for layer in self._layers:
            layer.forget()

    def discard_with_gradients(self) -> None:
        """Forget what has been gathered, as the gradients of the same passes are dropped.

        What belongs to a loss whose own pass is still to come stays (sampled labels; inputs, where they are all that is
        gathered): many loops call ``zero_grad`` between the forward pass and ``loss.backward()``.
        """
        if not (self.reached or self._passes or self.inside_transform or self.sampler is not None):
            return  # nothing has been gathered, as on every ordinary step
        if self._inputs.before_reset(self._gradients):
            return
        if self.sampler is None or self.sampler.trained:
            self.discard()

    def note_gradients(self) -> None:
        """Take note that gradients have been reset, where inputs wait for the backward pass to come."""
        if self.reached:
            self._inputs.after_reset(self._gradients)

    def discard_stale(self) -> None:
        """Forget sampled labels whose loss has been differentiated and left no gradient: dropped without a step."""
        if self.sampler is not None and self.sampler.trained and self._dropped():
            self.discard()

    def remove(self) -> None:
        """Remove all hooks."""
        module_calls.listen(self, ())
        eager_window.hold(self, False)

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Gather a layer's rows when the gradient of its output arrives.

        Args:
            layer: the layer.
            kind: the geometry of the module that has just run.
            x: its input.
            output: its output.
        """
        if self.phase(layer) is Phase.OFF or not torch.is_grad_enabled():
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.inside_transform.add(layer.name)
            return
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        if not layer.weight_view.is_there or not layer.weight.requires_grad:  # pruned since THOR was made; frozen
            return
        if "G" not in layer.sides:
            if self.gathers(layer):
                self._gather_inputs(layer, kind, x, output)
            return
        weight = layer.weight
        outer = _running_backward()  # a forward pass inside a backward pass: activation checkpointing
        x = x.detach()  # shares storage and version counter
        version = x._version
        weight_node = get_gradient_edge(weight).node if weight.is_leaf else None
        mask = self.row_mask
        sampler = self.sampler
        mark = sampler.mark(output) if sampler is not None else None
        earlier: tuple[int, Tensor | None] = -1, None  # when this call's gradient has come before, and what it was

        def on_gradient(g: Tensor) -> None:
            nonlocal earlier
            if self.phase(layer) is Phase.OFF:
                return
            sampled = sampler is not None and sampler.running  # it adds to no gradient
            if not sampled and weight_node is not None and not _accumulates(weight_node):
                return
            if sampler is not None and mark is not None and not sampled:
                mark.trained = sampler.trained = True
                return
            if x._version != version:
                raise RuntimeError(
                    f"the input of layer {layer.name!r} was changed in place between forward and backward, so its "
                    f"statistics would be wrong; make the operation that follows the layer's input out of place"
                )
            keep = mask if mask is not None and kind.row_shape(x) == mask.shape else None
            if sampler is not None:
                self.mask_taken |= keep is not None
                self.reached.add(layer)
                if not sampler.empty:
                    layer.gather(kind, x, g, keep)
                return
            into = self._pass(outer)
            again, before = earlier[0] == self._generation, earlier[1]
            into.repeated |= again
            total = g.detach() if before is None or not again else g.detach() + before
            # kept where another pass may come: G is that of the sum of all losses
            earlier = self._generation, total if _graph_stays() else None
            into.calls.append(_call(layer, kind, x))
            if self.gathers(layer):
                self.mask_taken |= keep is not None
                self.reached.add(layer)
                layer.gather(kind, x, total, keep, instead_of=before if again else None)

        output.register_hook(on_gradient)

    def _gather_inputs(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Tensor) -> None:
        """Gather the rows of a layer that has A alone, now: no gradient is waited for.

        A pass that is never differentiated counts too, unless ``optimizer.zero_grad()`` comes after it; what
        checkpointing recomputes does not count again.
        """
        if _running_backward() >= 0 and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return  # the first pass had gradients enabled and has been counted; else there are no such hooks
        if self._inputs.are_dropped(self._gradients):
            self.discard()
        self._inputs.add(self._gradients)
        keep = self.row_mask if self.row_mask is not None and kind.row_shape(x) == self.row_mask.shape else None
        self.mask_taken |= keep is not None
        self.reached.add(layer)
        enough = max(_ENOUGH_ROWS, _ROWS_A_COLUMN * layer.layouts()["A"].block)
        layer.gather_inputs(kind, x, output.shape, keep, enough)

    def _gradients(self) -> list[tuple[int, int]]:
        """Return what changes when a backward pass adds to the weights' gradients."""
        gradients = [layer.weight.grad for layer in self._layers if layer.weight_view.is_there]
        return [(-1, -1) if g is None else (id(g), g._version) for g in gradients]

    def _pass(self, outer: int) -> Pass:
        """Return the backward pass that is running, and forget the ones whose gradients have been dropped."""
        current = _running_backward()
        if outer >= 0 and outer != current:  # a nested backward pass belongs to the one that started it
            self._parents[current] = outer
        while current in self._parents:
            current = self._parents[current]
        if current not in self._passes:
            # A second pass before the step. Were the gradients of the first one dropped, without optimizer.zero_grad()?
            if self._passes and self._dropped():
                self.discard()
            self._passes[current] = Pass()
        return self._passes[current]

    def _dropped(self) -> bool:
        """Return whether no gradient is left of the passes so far.

        One layer does not tell: its gradient is zero where a gain behind it is, or where a whole micro-batch is masked.
        Zeros in all layers are dropped gradients where the rows had others (``model.zero_grad(set_to_none=False)``).
        """
        reached = [layer for layer in self._layers if layer in self.reached]
        if any(layer.has_gradient() for layer in reached):
            return False
        cleared = all(layer.weight.grad is None for layer in reached)
        return cleared or any(layer.has_rows_with_gradient() for layer in reached)

    def _remember_first(self) -> None:
        for one in self._passes.values():
            if one.calls:
                self._first = loss_terms_of_pass(one.calls).first


def _call(layer: LayerCurvature, kind: Kind, x: Tensor) -> Call:
    dims = tuple(kind.row_shape(x))
    # these modules know their layout, and are seen batch first; rows that are patches are those of a convolution
    certain = not dims or isinstance(kind, ProjectionKind)
    return Call(layer, kind.loss_terms(x), dims, certain, kind.diagonal_input)


def _running_backward() -> int:
    """Return the identity of the backward pass this thread is in, -1 outside."""
    return int(torch._C._current_graph_task_id())


def _graph_stays() -> bool:
    """Return whether the running backward pass leaves its graph for another one (``retain_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _accumulates(weight_node: Node) -> bool:
    """Return whether the running backward pass adds to the weight's gradient; a gradient penalty's pass does not."""
    try:
        return bool(torch._C._will_engine_execute_node(weight_node))
    except RuntimeError:  # what it says of a leaf under torch.autograd.grad, which fills no .grad
        return False
