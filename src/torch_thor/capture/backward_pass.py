"""Rows that are gathered in the backward pass, from a layer's input and the gradient of its output; and N.

The call of a layer registers a hook on its output. When the gradient of the output arrives, the hook has both input and
gradient and adds their rows. So an evaluation pass, a pass whose loss is never differentiated, and the first of the two
passes of activation checkpointing leave nothing behind, and the input is kept alive no longer than autograd keeps it
anyway.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from torch_thor.capture.loss_terms import Call, LossTerms, Pass, loss_terms_of_pass, loss_terms_of_step
from torch_thor.capture.phases import GATHERING, Phase
from torch_thor.capture.sampling import Sampler
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature

if TYPE_CHECKING:
    from torch_thor.capture.capture import Capture


class BackwardPasses:
    """Gathers the rows of all backward passes of a step, and counts the loss terms of these.

    Args:
        sampler: runs the passes of sampled labels, where rows come from those; None where they come from the loss.
    """

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler
        self.passes: dict[int, Pass] = {}  # by autograd's number of the pass
        self._parents: dict[int, int] = {}
        self._generation = 0  # of what is gathered: a pass that has been forgotten may go through its graph again
        self.first: LayerCurvature | None = None  # the layer nearest to the input that knows N

    # ---- rows ---------------------------------------------------------------------------------------------------

    def watch(self, capture: "Capture", layer: LayerCurvature, kind: Kind, x: Tensor, output: Tensor) -> None:
        """Gather a layer's rows when the gradient of its output arrives.

        Args:
            capture: knows what is gathered of which layer; a graph does not keep it alive.
            layer: the layer.
            kind: the geometry of the module that has just run.
            x: its input.
            output: its output.
        """
        weight, sampler, reference = layer.weight, self._sampler, weakref.ref(capture)
        # a forward pass inside a backward pass: activation checkpointing
        outer = torch._C._current_graph_task_id()
        x = x.detach()  # shares storage and version counter
        version = x._version
        weight_node = get_gradient_edge(weight).node if weight.is_leaf else None
        mask = capture.row_mask
        mark = sampler.mark(output) if sampler is not None else None
        earlier: tuple[int, Tensor | None] = -1, None  # when this call's gradient has come before, and what it was

        def on_gradient(g: Tensor) -> None:
            nonlocal earlier
            capture = reference()
            phase = Phase.OFF if capture is None else capture.phases.get(layer, Phase.OFF)
            if capture is None or phase is Phase.OFF:
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
            # kept where another pass may come (retain_graph): G is that of the sum of all losses
            graph_stays = torch._C._autograd._get_current_graph_task_keep_graph()
            earlier = self._generation, total if graph_stays else None
            # no row_shape: rows are patches, as in a convolution; registered kinds may lack batch_first
            certain = not row_shape or bool(getattr(kind, "batch_first", False))
            into.calls.append(Call(layer, kind.loss_terms(x), tuple(row_shape), certain, kind.diagonal_input))
            if phase in GATHERING:
                capture.mask_taken |= keep is not None
                capture.reached.add(layer)
                layer.statistics.gather(kind, x, total, keep, instead_of=before if again else None)

        output.register_hook(on_gradient)

    def _running_pass(self, capture: "Capture", outer: int) -> Pass:
        """Return the backward pass that is running, and forget the ones whose gradients have been dropped."""
        current = torch._C._current_graph_task_id()
        if outer >= 0 and outer != current:  # a nested backward pass belongs to the one that started it
            self._parents[current] = outer
        while current in self._parents:
            current = self._parents[current]
        found = self.passes.get(current)
        if found is None:
            # A second pass before the step. Were the gradients of the first one dropped, without optimizer.zero_grad()?
            if self.passes and capture.gradients_dropped():
                capture.discard()
            found = self.passes[current] = Pass()
        return found

    # ---- loss terms ---------------------------------------------------------------------------------------------

    @property
    def loss_terms(self) -> int:
        """N of the backward passes of this step; where labels are sampled, the number of labels."""
        if self._sampler is not None:
            return self._sampler.terms
        if len(self.passes) == 1:
            [one] = self.passes.values()
            if one.calls and not one.repeated:
                return _terms_of(one.calls).number
        return loss_terms_of_step(self.passes.values())

    @property
    def conflicting_loss_terms(self) -> tuple[int, int] | None:
        """N of a backward pass and what the layer nearest to the loss saw, where that is another number; else None.

        To be asked only while :attr:`first` is None, and all layers count: those that are left when others have stopped
        say less.
        """
        for one in self.passes.values():
            found = _terms_of(one.calls)
            if found.number != found.last:
                return found.number, found.last
        return None

    def forget(self) -> None:
        """Forget the passes of this step, and remember which layer knew N."""
        for one in self.passes.values():
            if one.calls:
                self.first = _terms_of(one.calls).first
        self.passes.clear()
        self._parents.clear()
        self._generation += 1


def _terms_of(calls: Sequence[Call]) -> LossTerms:
    """Return N of a pass: what all calls say alike, as nearly always, else what the rule makes of them."""
    number = calls[0].loss_terms
    for call in calls:
        if call.loss_terms != number or call.embedding:
            return loss_terms_of_pass(calls)
    return LossTerms(number, calls[-1].layer, number)


def _accumulates(weight_node: Node) -> bool:
    """Return whether the running backward pass adds to the weight's gradient; a gradient penalty's pass does not."""
    try:
        return bool(torch._C._will_engine_execute_node(weight_node))
    except RuntimeError:  # what it says of a leaf under torch.autograd.grad, which fills no .grad
        return False
