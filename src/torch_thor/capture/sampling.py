"""The sampled Fisher matrix: statistics from labels drawn from the model's own predictions.

The drawn labels are a function of a seed, the step, the process and the number of the call within
the step. So there is no random state to save, a resumed run draws the same labels as an
uninterrupted one, and the states of torch's own generators do not change.

Their loss is propagated backwards before the training loss, over the same graph, which is kept.
Only gradients of layer outputs are requested from autograd, so that no ``.grad`` changes and
no hook on a gradient of a weight runs, such as those with which DDP averages gradients.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributions import Bernoulli, Categorical, Distribution, Normal

from torch_thor.torch_internals import tree_leaves

Predicts = str | Callable[[Any], Distribution]


@dataclass
class Mark:
    """A record of one call of a layer.

    It is stored in the autograd graph, so that it lives as long as the graph.
    """

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
        self.loss_terms = 0  # the number of drawn labels that count
        self.trained = False  # whether the pass of the training loss has reached a layer

    def mark(self, output: Tensor) -> Mark:
        """Record in the graph that a tensor is the output of a layer."""
        edge = get_gradient_edge(output)
        mark = Mark(edge.output_nr)
        _metadata(edge.node).setdefault(self, []).append(mark)
        return mark

    def sample(
        self, output: Any, distribution: Predicts, dim: int | None, mask: Tensor | None, key: str
    ) -> None:
        """Draw labels from the model's predictions, and run their backward pass."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not any(tensor.requires_grad for tensor in tensors):
            raise ValueError(
                "the output given to sample_fisher() requires no gradient, so no layer's "
                "statistics can come from it; give what the model returned, not detached"
            )
        device = tensors[0].device
        casts = torch.amp.is_autocast_available(device.type)
        with torch.autocast(device.type, enabled=False) if casts else nullcontext():
            labels = _distribution(output, distribution, dim)
            likelihoods = labels.log_prob(_drawn(labels, device, f"{key}/{self.passes}"))
            if mask is not None:
                _check_mask(mask, likelihoods.shape)
                likelihoods = likelihoods.where(mask, 0.0)
            loss_terms = likelihoods.numel() if mask is None else int(mask.sum())
            self._differentiate(-likelihoods.sum(), loss_terms)

    def _differentiate(self, loss: Tensor, loss_terms: int) -> None:
        """Run the backward pass, in which the hooks of all layers receive gradients."""
        assert loss.grad_fn is not None
        marks: list[Mark] = []
        earliest: list[GradientEdge] = []  # marked outputs that depend on no other marked output
        # whether a node leads to a marked output; keeps the nodes alive, and so their identity
        leads: dict[Node, bool] = {}
        for node, following in _inputs_first(loss.grad_fn):
            here = _metadata(node).get(self, [])
            is_last = not any(leads[below] for below in following)
            marks += here
            earliest += [GradientEdge(node, mark.output_nr) for mark in here if is_last]
            leads[node] = bool(here) or not is_last
        reasons = {
            "came after loss.backward(), which frees the graph that it needs; call it between the "
            "forward pass and loss.backward()": any(mark.trained for mark in marks),
            "was called twice for one forward pass, which would count its rows twice; call it once "
            "with one distribution of everything that the model predicts": any(
                mark.sampled for mark in marks
            ),
            "cannot go through activation checkpoints with use_reentrant=True, for which torch "
            "knows no torch.autograd.grad; use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False)": any(n.name() == "CheckpointFunctionBackward" for n in leads),
            "cannot go through a DistributedDataParallel with a static graph, which would average "
            "its gradients; leave that option out": any(map(_averages_at_first, leads)),
        }
        for reason, holds in reasons.items():
            if holds:
                raise RuntimeError(f"sample_fisher() {reason}")
        for mark in marks:
            mark.sampled = True
        self.passes += 1
        self.loss_terms += loss_terms
        if not earliest:
            return
        self.running, self.empty = True, not loss_terms
        try:
            torch.autograd.grad(loss, earliest, retain_graph=True)
        finally:
            self.running = self.empty = False


def _inputs_first(output: Node) -> Iterator[tuple[Node, list[Node]]]:
    """Yield the nodes of a graph, each after those that follow in a backward pass, with these."""
    seen: set[Node] = set()
    stack = [(output, False)]
    while stack:
        node, is_complete = stack.pop()
        following = [below for below, _ in node.next_functions if below is not None]
        if is_complete:
            yield node, following
        elif node not in seen:
            seen.add(node)
            stack += [(node, True), *((below, False) for below in following)]


def _averages_at_first(node: Any) -> bool:
    return node.name() == "_DDPSinkBackward" and bool(node.ddp_weakref().static_graph)


def _metadata(node: Node) -> dict[Any, Any]:
    # a property that torch declares as a method
    return cast("dict[Any, Any]", node.metadata)


# validate_args would synchronise host and device
_NAMED: dict[str, Callable[[Tensor, int | None], Distribution]] = {
    "categorical": lambda logits, dim: Categorical(
        logits=_classes_last(logits, dim), validate_args=False
    ),
    "bernoulli": lambda logits, _: Bernoulli(logits=logits, validate_args=False),
    "normal": lambda means, _: Normal(means, torch.ones_like(means), validate_args=False),
}


def _distribution(output: Any, distribution: Predicts, dim: int | None) -> Distribution:
    if isinstance(output, Tensor) and output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    if dim is not None and distribution != "categorical":
        raise ValueError(f"dim={dim}: has a meaning for categorical logits only; leave it out")
    named = _NAMED.get(distribution) if isinstance(distribution, str) else None
    if named is not None and not isinstance(output, Tensor):
        raise ValueError(
            f"output of type {type(output).__name__}: must be a tensor where distribution= is "
            "a name; give the tensor (output.logits), or a callable that makes a "
            "torch.distributions.Distribution of the whole"
        )
    if named is not None:
        return named(output, dim)
    made = distribution(output) if callable(distribution) else None
    if not isinstance(made, Distribution):
        raise ValueError(
            f"distribution={distribution!r}: must be one of {', '.join(map(repr, _NAMED))}, or a "
            "callable that makes a torch.distributions.Distribution of the output; pass, for "
            "example, lambda mean: Normal(mean, 0.1)"
        )
    return made


def _classes_last(logits: Tensor, dim: int | None) -> Tensor:
    at = -1 if dim is None and logits.dim() <= 2 else dim
    if at is None or not -logits.dim() <= at < logits.dim():
        raise ValueError(
            f"dim={dim}: must be the dimension of the classes in logits of shape "
            f"{tuple(logits.shape)}, or None for the last of at most two; pass dim=1, as for "
            "torch.nn.functional.cross_entropy, or dim=-1, as for texts"
        )
    return logits.movedim(at, -1)


def _drawn(labels: Distribution, device: torch.device, key: str) -> Tensor:
    """Draw labels with generators seeded by a key, and restore the generators' states."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    devices = [] if device.type == "cpu" else [device.index]
    with torch.random.fork_rng(devices, device_type=device.type), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        if devices:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)
        return labels.sample()


def _check_mask(mask: Tensor, shape: torch.Size) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(
            f"mask={what}: must be a bool tensor of the labels' shape, {tuple(shape)}, True for "
            f"those that count; pass, for example, mask=labels != -100"
        )
