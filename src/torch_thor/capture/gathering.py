"""The gathering of statistics: which layers do so in a step, their rows, and loss terms.

The loss terms that are counted are those of the step's losses.

On a refresh step hooks see the calls of the layers (:mod:`torch_thor.capture.hooks`), and each call
registers a hook on its output. When the gradient of the output has been computed, that adds the
rows of both input and gradient. So an evaluation pass, a pass whose loss is never differentiated,
and one of the two forward passes of activation checkpointing add no rows, and the input is kept
alive no longer than autograd keeps it. Layers that have A alone need no gradient: what their calls
keep is the sum of their rows, or a copy of the input where that is small or smaller, until the
graph is freed.

Rows live until ``step``, until ``optimizer.zero_grad()``, or until no weight that a loss has
reached has a gradient.

Which layers gather follows from entries of their state (``due``, ``idle``, ``uncalled``), which
checkpoints contain. A layer that is due gathers if it is called. It is *awaited*, and a compiled
model runs eagerly for it, unless the loss did not reach it when it was due (idle; a frozen layer is
never reached), or its weight is used without calling its module (uncalled).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mode
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from torch_thor.capture.hooks import ModuleCalls, ModuleHook
from torch_thor.capture.sampling import Mark, Sampler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature, Statistics, with_gradient
from torch_thor.curvature.lifecycle import Life, after_refresh, after_step
from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.torch_internals import (
    backward_id,
    backward_keeps_graph,
    backward_reaches,
    functorch,
    uncompiled,
)

# The number of rows that is enough for A alone: this many, and at least so many for each column of
# a block. More rows would take time in large batches without improving A.
_ENOUGH_ROWS = 1024
_ROWS_PER_COLUMN = 8
# The size of an input that is kept in the place of the sum of its rows, however small that is.
_SMALL = 2**14


@dataclass(frozen=True)
class Call:
    """One call of a layer whose output has received a gradient."""

    layer: Any  # the layer, or anything hashable that identifies it
    loss_terms: int  # the size of the leading dimension of its input, 1 without a batch dimension
    dims: tuple[int, ...]  # the sizes of all dimensions of its input but that of the features
    certain: bool = False  # whether the leading dimension is known to be the batch
    embedding: bool = False  # whether the input consists of indices, of tokens or of positions


@dataclass
class Pass:
    """One backward pass."""

    calls: list[Call] = field(default_factory=list)
    repeated: bool = False  # whether it is another backward pass through calls that have had one


@dataclass
class Evidence:
    """What a step has seen beside its statistics, to tell why a layer with a gradient has none."""

    # layers whose outputs received gradients in passes that add nothing to .grad of their weights
    beside: set[LayerCurvature] = field(default_factory=set)
    # layers that had a gradient already when their statistics were asked for
    late: set[LayerCurvature] = field(default_factory=set)
    loaded: bool = False  # whether a state dict has asked for them
    dropped: bool = False  # whether zero_grad() has dropped statistics


@dataclass
class _Watched:
    """A call of a layer whose output has not received a gradient yet, or may receive another."""

    layer: LayerCurvature
    kind: Kind
    keep: Tensor | None  # which of the rows count; None for all
    weight: Node | None  # the node that adds to the gradient of the weight
    # the backward pass in which the call was made, as activation checkpointing does; -1 outside
    outer: int
    sequences: int  # their number in a nested input, whose rows are theirs; 0 for any other
    x: Any = None  # the input, where it is kept
    version: int = 0  # of the input
    enough: int | None = None  # a number of rows that is enough, for a layer that has A alone
    rows: Statistics | None = None  # those of the input, summed, where that is smaller than it
    mark: Mark | None = None
    # the step of the previous gradient, and the gradient where G needs it
    earlier: tuple[object, Tensor | None] = (None, None)


class Capture:
    """Gathers the statistics of all layers."""

    def __init__(self, *, sampled: bool = False) -> None:
        self.sampler = Sampler() if sampled else None
        self.row_mask: Tensor | None = None
        self.evidence = Evidence()
        self.layers: list[LayerCurvature] = []
        self.gathering: set[LayerCurvature] = set()
        self.awaited: set[LayerCurvature] = set()
        self._calls = ModuleCalls(self)
        self.discard()

    def follow(self, model: nn.Module, hooks: Sequence[ModuleHook]) -> None:
        """Replace the hooks, and keep what has been gathered.

        New layers gather from the next :meth:`listen` on.
        """
        self._model, self._hooks = model, list(hooks)
        self.layers = list(dict.fromkeys(layer for hook in hooks for layer in hook.layers))
        self.gathering.intersection_update(self.layers)
        self.awaited.intersection_update(self.layers)

    def listen(self, *, unseen: bool = False) -> None:
        """Register the hooks that the layers' states call for, and remove all others."""
        self.gathering = {
            layer
            for layer in self.layers
            # a weight that has a state was trained once: parts of a model may be frozen in turn
            if layer.due and (layer.weight.requires_grad or layer.weight_view.state)
        }
        self.awaited = {layer for layer in self.gathering if not layer.uncalled and not layer.idle}
        needed = (
            [hook for hook in self._hooks if not self.gathering.isdisjoint(hook.by_name.values())]
            if self.awaited
            else ()
        )
        self._calls.listen(self._model, needed, unseen=unseen)

    def listen_again(self, *, loaded: bool = False) -> None:
        """Register other hooks between two steps; layers that gather keep their statistics.

        ``loaded``: because a state dict was loaded.
        """
        before = self.gathering
        self.listen()
        new = self.gathering - before
        self.evidence.late |= {layer for layer in new if layer.weight.grad is not None}
        self.evidence.loaded |= loaded
        if not self.awaited:
            self.discard()

    @property
    def ran_as_replicas(self) -> bool:
        """Whether replicas of torch.nn.DataParallel have run since the hooks were registered."""
        return self._calls.ran_as_replicas

    # ---- rows ------------------------------------------------------------------------------------

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Handle a call of a layer."""
        if layer not in self.gathering or not torch.is_grad_enabled():
            return
        if functorch() is not None:
            self.inside_transform.add(layer.name)
            return
        weight = layer.weight_view.module._parameters.get(layer.weight_view.attribute)
        # pruned since the optimizer was created, or frozen
        if weight is None or not weight.requires_grad:
            return
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        inputs, mask = as_rows(x), self.row_mask
        call = _Watched(
            layer,
            kind,
            mask if mask is not None and kind.row_shape(inputs) == mask.shape else None,
            get_gradient_edge(weight).node if weight.is_leaf else None,
            backward_id(),
            x.size(0) if x.is_nested else 0,
        )
        block_sizes = layer.a.layout.block_sizes
        call.enough = max(_ENOUGH_ROWS, _ROWS_PER_COLUMN * block_sizes.width)
        if layer.g is not None:
            call.x, call.version = inputs, inputs._version  # shares storage and version counter
            call.mark = None if self.sampler is None else self.sampler.mark(output)
        elif inputs.numel() <= max(_SMALL, block_sizes.rows * block_sizes.width):
            call.x = inputs.clone()
        else:
            call.rows = Statistics(layer.kind, layer.stored)
            shape = as_rows(output).shape
            call.rows.gather(kind, inputs, shape, call.keep, most=call.enough)
        output.register_hook(partial(self._on_gradient, call))

    def _on_gradient(self, call: _Watched, g: Tensor) -> None:
        """Take the rows of a call, now that the gradient of its output has been computed."""
        layer, sampler = call.layer, self.sampler
        if layer not in self.gathering:
            return
        try:  # whether this backward pass adds to the gradient of the weight
            trains = call.weight is None or backward_reaches(call.weight)
        except RuntimeError:  # raised for a leaf under torch.autograd.grad, which adds to no .grad
            trains = False
        sampled = sampler is not None and sampler.running
        if not (trains or sampled):  # as a gradient penalty's pass
            self.evidence.beside.add(layer)
            if torch.is_grad_enabled() and layer.g is None:
                self._differentiated[layer].append(call)
        elif layer.g is not None:
            self._add_both(call, as_rows(g), sampled=sampled)
        else:
            self._running_pass(call.outer)
            for each in (*self._differentiated.pop(layer, ()), call):
                self._add_inputs(each, as_rows(g).shape)

    def _add_inputs(self, call: _Watched, output: torch.Size) -> None:
        """Add the rows of the input of a call, once for each step."""
        if call.earlier[0] is self._step:
            return
        call.earlier = self._step, None
        self.mask_taken |= call.keep is not None
        self.reached.add(call.layer)
        if call.rows is not None:
            call.layer.statistics.add(call.rows)
        else:
            call.layer.statistics.gather(call.kind, call.x, output, call.keep, most=call.enough)

    def _add_both(self, call: _Watched, g: Tensor, *, sampled: bool) -> None:
        """Add the rows of a call and of the gradient of its output."""
        layer, kind, sampler, before = call.layer, call.kind, self.sampler, None
        if sampler is not None and call.mark is not None and not sampled:
            call.mark.trained = sampler.trained = True
            return
        if call.x._version != call.version:
            raise RuntimeError(
                f"the input of layer {layer.name!r} was changed in place between forward and "
                "backward, so its statistics would be wrong; make the operation that follows the "
                "layer's input out of place"
            )
        if sampler is None:
            into = self._running_pass(call.outer)
            dims = (call.sequences,) if call.sequences else tuple(kind.row_shape(call.x))
            # no dims: rows are patches, as in a convolution; registered kinds may lack batch_first
            certain = not dims or call.sequences > 0 or bool(getattr(kind, "batch_first", False))
            loss_terms = call.sequences or kind.loss_terms(call.x)
            into.calls.append(Call(layer, loss_terms, dims, certain, kind.diagonal_input))
            if call.earlier[0] is self._step:
                into.repeated, before = True, call.earlier[1]
            g = g if before is None else g + before
            # kept if another pass may follow (retain_graph), because G is that of the sum of all
            # losses
            call.earlier = self._step, g if backward_keeps_graph() else None
        self.mask_taken |= call.keep is not None
        self.reached.add(layer)
        if sampler is None or not sampler.empty:
            layer.statistics.gather(kind, call.x, g, call.keep, instead_of=before)

    def _running_pass(self, outer: int) -> Pass:
        """Return the running backward pass; forget earlier ones if their gradients were dropped."""
        current = backward_id()
        # a nested backward pass belongs to the one that started it
        if outer >= 0 and outer != current:
            self._parents[current] = outer
        while current in self._parents:
            current = self._parents[current]
        if current not in self.passes:
            if self.passes and self.gradients_dropped():  # by model.zero_grad(), for example
                self.discard()
            self.passes[current] = Pass()
            self.evidence.late.clear()
        return self.passes[current]

    # ---- the end of a step -----------------------------------------------------------------------

    def gradients_dropped(self) -> bool:
        """Return whether no weight that a loss has reached in this step has a gradient any more."""
        views = [layer.weight_view for layer in self.reached]
        return all(
            view.shards is None and view.present is not None and view.present.grad is None
            for view in views
        )

    def finish_refresh(
        self,
        due: Iterable[LayerCurvature],
        events: Iterable[RefreshEvent],
        without_statistics: Collection[LayerCurvature],
    ) -> None:
        """Record what a refresh has decided on each layer, and drop the statistics.

        Layers with a gradient and without statistics have weights that are used without calling
        them.
        """
        decisions = {event.layer: event.decision for event in events}
        others = [layer for layer in due if layer not in self.reached]
        late = with_gradient(others) if others else ()
        for layer in due:
            reached = layer in self.reached
            life = after_refresh(
                layer.life,
                decision=decisions.get(layer.name),
                reached=reached,
                without_statistics=layer in without_statistics,
                has_gradient=reached or layer in late,
                has_factors=layer.refreshes > 0,
            )
            layer.record(**vars(life))
        self.evidence = Evidence()
        self.discard()

    def finish_step(self) -> dict[LayerCurvature, Life]:
        """Drop a non-refresh step's statistics; return what idle layers were that it reached."""
        idle = with_gradient(layer for layer in self.gathering if layer.idle)
        reached = {layer: layer.life for layer in idle}
        for layer, life in reached.items():
            layer.record(**vars(after_step(life, has_gradient=True)))
        self.discard()
        return reached

    @uncompiled
    def discard(self) -> None:
        """Drop all statistics and loss terms of this step."""
        self._step = object()  # a pass of the next step may go through an earlier graph again
        self.passes: dict[int, Pass] = {}  # by autograd's id of the pass
        self._parents: dict[int, int] = {}  # the id of the outer pass of each nested one
        # calls that a pass with create_graph went through, which a loss may reach by its result
        self._differentiated: defaultdict[LayerCurvature, list[_Watched]] = defaultdict(list)
        # layers that the loss has reached in this step, also without rows
        self.reached: set[LayerCurvature] = set()
        # layers that ran under torch.func, where hooks see no gradient
        self.inside_transform: set[str] = set()
        self.mask_taken = False  # whether the mask has fitted the input of a layer in this step
        if self.sampler is not None:
            self.sampler.reset()
        for layer in self.layers:
            layer.statistics.forget()


def as_rows(tensor: Tensor) -> Tensor:
    """Return an input or the gradient of an output as a dense tensor.

    The sequences of a nested one follow each other.
    """
    dense = tensor.detach()
    if dense.is_nested:
        return torch.cat(dense.unbind())
    return dense if dense.layout is torch.strided else dense.to_dense()


# ---- N, the number of loss terms -----------------------------------------------------------------
# As a rule the input of a layer has N samples in its leading dimension. The exceptions are found by
# comparing the layers of one pass: position embeddings (1, L), inputs without a batch dimension,
# sequence-first inputs (L, N, d), and windows and experts, which see other numbers of rows than the
# other layers.


def loss_terms_of_pass(calls: Iterable[Call]) -> tuple[int, int]:
    """Return the number of samples of a pass, and that nearest to the loss.

    If they differ, N is uncertain.
    """
    # 1. Calls of embeddings are left out if other layers were reached, and calls without a batch
    # dimension if others have one. 2. If calls whose leading dimension is certainly the batch have
    # M samples, a call with M in its second dimension and not in its leading one is sequence first,
    # and has M samples. 3. N is the number of the calls nearest to the input and nearest to the
    # loss if these agree; otherwise the most frequent number, and of several such numbers the one
    # nearest to the input.
    calls = list(calls)
    most = max(len(c.dims) for c in calls)  # of positions (L,) and tokens (N, L), the latter
    telling = [c for c in calls if not c.embedding] or [c for c in calls if len(c.dims) == most]
    telling = [c for c in telling if c.loss_terms > 1] or telling
    certain = [c.loss_terms for c in telling if c.certain]
    samples = mode(certain) if certain else 0
    sequence_first = [
        not c.certain and len(c.dims) > 1 and c.dims[0] != samples == c.dims[1] for c in telling
    ]
    numbers = [
        samples if is_first else c.loss_terms
        for c, is_first in zip(telling, sequence_first, strict=True)
    ]
    last, first = numbers[0], numbers[-1]
    # of equally frequent numbers mode() returns the first
    return (first if first == last else mode(reversed(numbers))), last


def loss_terms_of_step(passes: Iterable[Pass]) -> tuple[int, tuple[int, int] | None]:
    """Return N of a step, and the first pass whose N is uncertain.

    The pass is given as :func:`loss_terms_of_pass` returns it.
    """
    counted = [(each, *loss_terms_of_pass(each.calls)) for each in passes if each.calls]
    totals: Counter[Any] = Counter()
    for each, number, _ in counted:
        # the sum over micro-batches, but not over several losses of one batch
        if not each.repeated:
            totals.update(dict.fromkeys({call.layer for call in each.calls}, number))
    uncertain = next(((number, last) for _, number, last in counted if number != last), None)
    return max(totals.values(), default=0), uncertain
