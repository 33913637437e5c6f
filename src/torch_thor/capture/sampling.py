"""The backward pass of sampled labels: from their loss to the outputs of the layers, and no further.

It runs before the training loss's own backward pass, over the same graph, which it keeps. Since it is asked for the
gradients of layer outputs alone, autograd computes no gradient of a weight: no ``.grad`` changes, and no hook on a
gradient runs, such as those by which DDP averages.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class Mark:
    """What is known of one call of a layer, noted in the graph itself, so that it lives as long as the graph does.

    Args:
        output_nr: which output of its node the layer's output is.
        sampled: whether the pass of sampled labels has come by.
        trained: whether the training loss's pass has.
    """

    output_nr: int
    sampled: bool = False
    trained: bool = False


class Sampler:
    """Runs the passes of sampled labels, and knows what they have brought to this step."""

    def __init__(self) -> None:
        self.running = False  # whether the running backward pass is one of sampled labels
        self.empty = False  # and whether no label of it counts
        self.reset()

    def reset(self) -> None:
        """Forget the passes of this step."""
        self.passes = 0
        self.terms = 0  # labels drawn that count
        self.trained = False  # whether the training loss's pass has come by
        self.nonfinite = False  # whether a prediction was NaN or inf, so that nothing could be drawn

    def mark(self, output: Tensor) -> Mark:
        """Note in the graph that a layer's output is here.

        Args:
            output: it.

        Returns:
            The note.
        """
        edge = get_gradient_edge(output)
        mark = Mark(edge.output_nr)
        _metadata(edge.node).setdefault(self, []).append(mark)
        return mark

    def differentiate(self, loss: Tensor, terms: int) -> None:
        """Have the hooks of all layers below a loss see its gradients, and keep its graph.

        Args:
            loss: the sum of the negative log-likelihoods of the drawn labels.
            terms: how many there are.

        Raises:
            RuntimeError: the training loss has been differentiated already, labels were drawn from this forward pass
                before, or it has reentrant checkpoints.
        """
        assert loss.grad_fn is not None
        found = _Below(loss.grad_fn, self)
        if any(mark.trained for mark in found.marks):
            raise RuntimeError(
                "sample_fisher() came after loss.backward(), which frees the graph that it needs; call it between the "
                "forward pass and loss.backward()"
            )
        if any(mark.sampled for mark in found.marks):
            raise RuntimeError(
                "sample_fisher() was called twice for one forward pass, which would count its rows twice; call it once "
                "with one distribution of everything that the model predicts"
            )
        if found.reentrant:
            raise RuntimeError(
                "sample_fisher() cannot go through activation checkpoints with use_reentrant=True, for which torch "
                "knows no torch.autograd.grad; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        for mark in found.marks:
            mark.sampled = True
        self.passes += 1
        self.terms += terms
        if not found.earliest:
            return
        self.running, self.empty = True, not terms
        try:
            with _static_graphs_left_alone(found.sinks):
                torch.autograd.grad(loss, found.earliest, retain_graph=True)
        finally:
            self.running = self.empty = False


class _Below:
    """What is in the graph below a loss.

    To see the gradients of all marked outputs it is enough to ask for those of the earliest ones, below which there is
    no other: a gradient that autograd is asked for is kept until its pass is over, and these are the last to come.

    Args:
        root: the node of the loss.
        key: whose marks.
    """

    def __init__(self, root: Node, key: object) -> None:
        self.marks: list[Mark] = []
        self.earliest: list[GradientEdge] = []
        self.sinks: list[Any] = []  # nodes that DDP puts behind the outputs of a model
        self.reentrant = False
        leads_to_mark: dict[Node, bool] = {}  # also keeps the nodes alive: their identity is that of a wrapper
        stack = [(root, False)]
        while stack:
            node, is_complete = stack.pop()
            following = [following for following, _ in node.next_functions if following is not None]
            if is_complete:
                below = any(leads_to_mark[one] for one in following)
                marks = _metadata(node).get(key, [])
                self.marks += marks
                if marks and not below:
                    self.earliest += [GradientEdge(node, mark.output_nr) for mark in marks]
                leads_to_mark[node] = below or bool(marks)
            elif node not in leads_to_mark:
                leads_to_mark[node] = False
                self._look_at(node)
                stack.append((node, True))
                stack += [(one, False) for one in following]

    def _look_at(self, node: Node) -> None:
        name = node.name()
        self.reentrant |= name == "CheckpointFunctionBackward"
        if name == "_DDPSinkBackward":
            self.sinks.append(node)


def _metadata(node: Node) -> dict[Any, Any]:
    metadata: Any = node.metadata  # a property, which torch declares as a method
    assert isinstance(metadata, dict)
    return metadata


@contextmanager
def _static_graphs_left_alone(sinks: list[Any]) -> Iterator[None]:
    """Keep ``DistributedDataParallel(static_graph=True)`` from averaging after this pass in its first step.

    The first pass that comes through its sink has it average at the end, and only that one: this one has no gradients.
    """
    with ExitStack() as stack:
        for sink in sinks:
            wrapper = sink.ddp_weakref()
            if wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued:
                wrapper._static_graph_delay_allreduce_enqueued = True
                stack.callback(setattr, wrapper, "_static_graph_delay_allreduce_enqueued", False)
        yield
