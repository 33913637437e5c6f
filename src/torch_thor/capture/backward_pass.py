"""Gathers the rows of backward passes, from the inputs of layers and the gradients of their outputs; counts loss terms.

Each call of a layer registers a hook on its output. When the gradient of the output has been computed, the hook adds
the rows of both input and gradient. So an evaluation pass, a pass whose loss is never differentiated, and the first of
the two forward passes of activation checkpointing add no rows, and the input is kept alive no longer than autograd
keeps it.

Layers that have A alone need no gradient. Their rows are summed in the forward pass, so that no input is kept alive,
and the hook adds the sum.
"""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from torch_thor.capture.loss_terms import Call, Pass, loss_terms_of_pass, loss_terms_of_step
from torch_thor.capture.sampling import Sampler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.statistics import Statistics
from torch_thor.torch_internals import backward_id, backward_keeps_graph, backward_reaches, saves_through_hooks

if TYPE_CHECKING:
    from torch_thor.capture.capture import Capture

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


class BackwardPasses:
    """Gathers the rows of all backward passes of a step, and counts their loss terms."""

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler
        self.passes: dict[int, Pass] = {}  # by autograd's id of the pass
        self._parents: dict[int, int] = {}  # the id of the outer pass of each nested one
        self._waiting: dict[LayerCurvature, _Waiting] = {}
        self._generation = 0  # counts calls of forget(), after which a pass may go through an earlier graph again

    # ---- rows ---------------------------------------------------------------------------------------------------

    def watch(
        self, capture: "Capture", layer: LayerCurvature, weight: Tensor, kind: Kind, x: Tensor, output: Tensor
    ) -> None:
        """Gather a layer's rows when the gradient of its output has been computed."""
        sampler, reference = self._sampler, weakref.ref(capture)
        # at least 0 in a forward pass inside a backward pass, which activation checkpointing runs
        outer = backward_id()
        x = x.detach()  # shares storage and version counter
        version = x._version
        weight_node = get_gradient_edge(weight).node if weight.is_leaf else None
        mask = capture.row_mask
        mark = sampler.mark(output) if sampler is not None else None
        earlier: tuple[int, Tensor | None] = -1, None  # the generation of the previous gradient of this call, and it

        def on_gradient(g: Tensor) -> None:
            nonlocal earlier
            capture = reference()
            if capture is None or layer not in capture.gathering:
                return
            sampled = sampler is not None and sampler.running  # such a pass adds to no gradient of a weight
            if not sampled and not _accumulates(weight_node):
                return
            if sampler is not None and mark is not None and not sampled:
                mark.trained = sampler.trained = True
                return
            if x._version != version:
                raise RuntimeError(
                    f"the input of layer {layer.name!r} was changed in place between forward and backward, so its "
                    f"statistics would be wrong; make the operation that follows the layer's input out of place"
                )
            row_shape = kind.row_shape(x)
            keep = mask if mask is not None and row_shape == mask.shape else None
            if sampler is not None:
                capture.mask_taken |= keep is not None
                capture.reached.add(layer)
                if not sampler.empty:
                    layer.statistics.gather(kind, x, g, keep)
                return
            into = self._running_pass(capture, outer)
            again, before = earlier[0] == self._generation, earlier[1]
            into.repeated |= again
            total = g.detach() if before is None or not again else g.detach() + before
            # kept if another pass may follow (retain_graph), because G is that of the sum of all losses
            graph_stays = backward_keeps_graph()
            earlier = self._generation, total if graph_stays else None
            # no row_shape: rows are patches, as in a convolution; registered kinds may lack batch_first
            certain = not row_shape or bool(getattr(kind, "batch_first", False))
            into.calls.append(Call(layer, kind.loss_terms(x), tuple(row_shape), certain, kind.diagonal_input))
            capture.mask_taken |= keep is not None
            capture.reached.add(layer)
            layer.statistics.gather(kind, x, total, keep, instead_of=before if again else None)

        output.register_hook(on_gradient)

    def gather_inputs(
        self, capture: "Capture", layer: LayerCurvature, weight: Tensor, kind: Kind, x: Tensor, output: Tensor
    ) -> None:
        """Sum the rows of a layer that has A alone; they count once the gradient of its output has been computed."""
        outer = backward_id()
        if outer >= 0 and saves_through_hooks():
            return  # recomputed by a non-reentrant checkpoint, whose first pass had gradients enabled and was counted
        if layer not in self._waiting:
            self._waiting[layer] = _Waiting(Statistics(layer.kind, layer.weight_view, layer.stored))
        waiting, mask = self._waiting[layer], capture.row_mask
        keep = mask if mask is not None and kind.row_shape(x) == mask.shape else None
        waiting.masked |= keep is not None
        enough = max(_ENOUGH_ROWS, _ROWS_PER_COLUMN * layer.stored[0].cut.width)
        waiting.rows.gather_inputs(kind, x, output.shape, keep, enough)
        reference, weight_node = weakref.ref(capture), get_gradient_edge(weight).node if weight.is_leaf else None

        def on_gradient(_: Tensor) -> None:
            capture = reference()
            if capture is None or layer not in capture.gathering or not _accumulates(weight_node):
                return
            self._waiting.clear()  # later calls wait for another backward pass
            self._running_pass(capture, outer)
            if waiting.counted != self._generation:
                waiting.counted = self._generation
                capture.mask_taken |= waiting.masked
                capture.reached.add(layer)
                layer.statistics.add(waiting.rows)

        output.register_hook(on_gradient)

    def _running_pass(self, capture: "Capture", outer: int) -> Pass:
        """Return the backward pass that is running, and forget earlier ones whose gradients have been dropped."""
        current = backward_id()
        if outer >= 0 and outer != current:  # a nested backward pass belongs to the one that started it
            self._parents[current] = outer
        while current in self._parents:
            current = self._parents[current]
        found = self.passes.get(current)
        if found is None:
            if self.passes and capture.gradients_dropped():  # by model.zero_grad(), for example
                capture.discard()
            found = self.passes[current] = Pass()
        return found

    # ---- loss terms ---------------------------------------------------------------------------------------------

    @property
    def loss_terms(self) -> int:
        """N of the backward passes of this step; if labels are sampled, the number of labels."""
        if self._sampler is not None:
            return self._sampler.terms
        return loss_terms_of_step(self.passes.values())

    @property
    def conflicting_loss_terms(self) -> tuple[int, int] | None:
        """N of a backward pass and the number seen by the layer nearest to the loss, if they differ; else None."""
        found = (loss_terms_of_pass(one.calls) for one in self.passes.values() if one.calls)
        return next((pair for pair in found if pair[0] != pair[1]), None)

    def forget(self) -> None:
        """Forget the passes of this step."""
        self.passes.clear()
        self._parents.clear()
        self._waiting.clear()
        self._generation += 1


def _accumulates(weight_node: Node | None) -> bool:
    """Return whether the running backward pass adds to the weight's gradient; a gradient penalty's pass does not."""
    try:
        return weight_node is None or backward_reaches(weight_node)
    except RuntimeError:  # raised for a leaf under torch.autograd.grad, which adds to no .grad
        return False
