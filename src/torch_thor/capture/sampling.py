"""The backward pass of the loss of sampled labels, which computes the gradients of layer outputs and of no weight.

It runs before the backward pass of the training loss, over the same graph, which it keeps. Only gradients of layer
outputs are requested from autograd, so that no ``.grad`` changes and no hook on a gradient of a weight runs, such as
those with which DDP averages gradients.
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
    """A record of one call of a layer. It is stored in the autograd graph, so that it lives as long as the graph."""

    output_nr: int  # the index of the layer's output among the outputs of its node
    sampled: bool = False  # whether a backward pass of sampled labels has reached the output
    trained: bool = False  # whether the backward pass of the training loss has reached it


class Sampler:
    """Runs the backward passes of sampled labels, and counts the labels of the current step."""

    def __init__(self) -> None:
        self.running = False  # whether a backward pass of sampled labels is running
        self.empty = False  # whether none of its labels counts, because all are masked
        self.reset()

    def reset(self) -> None:
        """Reset the counts at the end of a step."""
        self.passes = 0
        self.terms = 0  # the number of drawn labels that count
        self.trained = False  # whether the pass of the training loss has reached a layer
        self.nonfinite = False  # whether a prediction was NaN or inf, so that no labels could be drawn

    def mark(self, output: Tensor) -> Mark:
        """Record in the graph that a tensor is the output of a layer."""
        edge = get_gradient_edge(output)
        mark = Mark(edge.output_nr)
        _metadata(edge.node).setdefault(self, []).append(mark)
        return mark

    def differentiate(self, loss: Tensor, terms: int) -> None:
        """Run the backward pass of the sampled labels, in which the hooks of all layers receive gradients."""
        assert loss.grad_fn is not None
        found = _MarkedOutputs(loss.grad_fn, self)
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
            with _no_averaging_of_static_graphs(found.sinks):
                torch.autograd.grad(loss, found.earliest, retain_graph=True)
        finally:
            self.running = self.empty = False


class _MarkedOutputs:
    """The marked outputs in the graph of a loss."""

    def __init__(self, root: Node, key: object) -> None:
        self.marks: list[Mark] = []
        self.earliest: list[GradientEdge] = []
        self.sinks: list[Any] = []  # the nodes that DDP appends to the outputs of a model
        self.reentrant = False
        leads_to_mark: dict[Node, bool] = {}  # also keeps the Python objects of the nodes, and so their identity, alive
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
                self._inspect(node)
                stack.append((node, True))
                stack += [(one, False) for one in following]

    def _inspect(self, node: Node) -> None:
        name = node.name()
        self.reentrant |= name == "CheckpointFunctionBackward"
        if name == "_DDPSinkBackward":
            self.sinks.append(node)


def _metadata(node: Node) -> dict[Any, Any]:
    metadata: Any = node.metadata  # a property that torch declares as a method
    assert isinstance(metadata, dict)
    return metadata


@contextmanager
def _no_averaging_of_static_graphs(sinks: list[Any]) -> Iterator[None]:
    """Keep ``DistributedDataParallel(static_graph=True)`` from averaging after this pass in its first step."""
    with ExitStack() as stack:
        for sink in sinks:
            wrapper = sink.ddp_weakref()
            if wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued:
                wrapper._static_graph_delay_allreduce_enqueued = True
                stack.callback(setattr, wrapper, "_static_graph_delay_allreduce_enqueued", False)
        yield
