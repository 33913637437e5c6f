"""From gradients to weights: the natural gradient; weight decay; clipping; momentum, in this order.

What is not preconditioned takes the step of :class:`torch.optim.SGD`, rounded as that rounds it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.curvature.precision import factor_dtype
from torch_thor.optim.parameters import Group, ParameterIndex, Share, with_gradient


@dataclass
class Part:
    """Parameters of one group that are treated alike.

    Args:
        group: their parameter group.
        params: those with a gradient.
        decaying: which of them decay.
        buffers: their momentum buffers; empty where momentum is 0.
        shares: of each, what the layers that precondition it have of it; empty for the others.
    """

    group: Group
    params: list[nn.Parameter]
    decaying: list[bool]
    buffers: list[Tensor]
    shares: list[list[Share]]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients, in order; sparse ones made dense, as momentum and weight decay are."""
        return [g.to_dense() if g.is_sparse else g for g in self.given_gradients]

    @property
    def given_gradients(self) -> list[Tensor]:
        """The gradients as they were given, in order."""
        return [p.grad for p in self.params if p.grad is not None]

    def pieces(self) -> Iterator["Part"]:
        """Yield what to update in one go.

        Yields:
            On a CPU one parameter, while its momentum is in cache; elsewhere all, for few launches.
        """
        if any(p.device.type != "cpu" for p in self.params):
            yield self
            return
        for i in range(len(self.params)):
            one = slice(i, i + 1)
            yield Part(self.group, self.params[one], self.decaying[one], self.buffers[one], self.shares[one])


def update(
    groups: list[Group],
    index: ParameterIndex,
    buffer_of: Callable[[nn.Parameter], Tensor],
    decays: Callable[[nn.Parameter], bool],
    diagonal_scale: float,
) -> None:
    """Update every parameter that has a gradient.

    Args:
        groups: parameter groups.
        index: which layer preconditions which parameter.
        buffer_of: returns a parameter's momentum buffer.
        decays: whether weight decay applies to a parameter.
        diagonal_scale: what turns ∇² into the diagonal Fisher: N for a mean loss; 0 while that is not known.
    """
    clipped: list[tuple[Part, list[Tensor]]] = []
    for group in groups:
        natural, elementwise, plain = _parts(group, index, buffer_of, decays)
        if plain.params:
            _update_plain(plain)
        if elementwise.params:
            _update_elementwise(elementwise, diagonal_scale)
        if not natural.params:
            continue
        if natural.buffers and not group["nesterov"] and group["kl_clip"] is None:
            _update_in_place(natural)
            continue
        directions = [torch.zeros_like(p, dtype=factor_dtype(p.dtype)) for p in natural.params]
        _accumulate_natural_gradients_(natural, directions, 0.0)
        _add_weight_decay_(natural, directions)
        if group["kl_clip"] is None:
            _momentum_step(natural, directions)
        else:
            clipped.append((natural, directions))
    _clip_(clipped)
    for part, directions in clipped:
        _momentum_step(part, directions)


def _parts(
    group: Group,
    index: ParameterIndex,
    buffer_of: Callable[[nn.Parameter], Tensor],
    decays: Callable[[nn.Parameter], bool],
) -> tuple[Part, Part, Part]:
    natural, elementwise, plain = (Part(group, [], [], [], []) for _ in range(3))
    for _, parameter, _ in with_gradient([group]):
        shares = index.shares(parameter)
        part = elementwise if index.elementwise(parameter) else plain
        if any(share.layer.refreshes for share in shares):
            part = natural
            part.shares.append(shares)
        part.params.append(parameter)
        part.decaying.append(bool(group["weight_decay"]) and decays(parameter))
        if group["momentum"]:
            part.buffers.append(buffer_of(parameter))
    return natural, elementwise, plain


def _update_plain(part: Part) -> None:
    directions = []
    for parameter, gradient, decaying in zip(part.params, part.gradients, part.decaying, strict=True):
        # a copy only where weight decay would change the user's gradient, or its precision is below the momentum's
        directions.append(gradient.to(factor_dtype(parameter.dtype), copy=decaying))
    _add_weight_decay_(part, directions)
    _momentum_step(part, directions)


def _update_elementwise(part: Part, diagonal_scale: float) -> None:
    """``d = ∇ / (N ∇² + √λ)``, the damped diagonal of the empirical Fisher, with the batch as one sample of it."""
    if not diagonal_scale:
        _update_plain(part)
        return
    gradients = [g.to(factor_dtype(p.dtype)) for p, g in zip(part.params, part.gradients, strict=True)]
    fisher = list(torch._foreach_mul(gradients, gradients))
    torch._foreach_mul_(fisher, diagonal_scale)
    torch._foreach_add_(fisher, math.sqrt(float(part.group["damping"])))
    directions = list(torch._foreach_div(gradients, fisher))
    _add_weight_decay_(part, directions)
    _momentum_step(part, directions)


def _update_in_place(natural: Part) -> None:
    """``v ← μ v + d`` with d added block by block, never formed: it would be three more passes over the model."""
    momentum, lr = float(natural.group["momentum"]), float(natural.group["lr"])
    for part in natural.pieces():
        _accumulate_natural_gradients_(part, part.buffers, momentum)
        _add_weight_decay_(part, part.buffers)
        torch._foreach_add_(list[Tensor](part.params), part.buffers, alpha=-lr)


def _accumulate_natural_gradients_(part: Part, into: list[Tensor], decay: float) -> None:
    for shares, gradient, target in zip(part.shares, part.given_gradients, into, strict=True):
        for rows in _rows_of_nobody(shares, len(target)):
            target[rows].mul_(decay).add_(gradient[rows])
        for share in shares:
            ours, theirs = share.piece.of(gradient), share.piece.of(target)
            if not share.layer.refreshes:  # one projection of a fused weight may have none while the others do
                theirs.mul_(decay).add_(ours)
            elif share.is_weight:
                share.layer.accumulate_natural_gradient_(ours, theirs, decay)
            else:
                share.layer.accumulate_natural_bias_gradient_(ours, theirs, decay)


def _rows_of_nobody(shares: list[Share], length: int) -> list[slice]:
    """Return the rows of a parameter that no layer has: a projection of a fused weight that was left out."""
    taken = sorted((s.piece.rows.start, s.piece.rows.stop) for s in shares if s.piece.rows is not None)
    if not taken:
        return []
    starts, stops = [0, *(stop for _, stop in taken)], [*(start for start, _ in taken), length]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _add_weight_decay_(part: Part, directions: list[Tensor]) -> None:
    chosen = [i for i, decaying in enumerate(part.decaying) if decaying]
    if chosen:
        weights: list[Tensor] = [part.params[i] for i in chosen]
        torch._foreach_add_([directions[i] for i in chosen], weights, alpha=float(part.group["weight_decay"]))


def _clip_(moves: list[tuple[Part, list[Tensor]]]) -> None:
    """Scale directions by ``min(1, √(κ / Σ lr² ⟨d, ∇⟩))``, the sum over all of them (Ba et al. 2017, section 5)."""
    divergences = []  # twice the KL divergence that the step is predicted to make
    for part, directions in moves:
        products = [torch.sum(d * g) for d, g in zip(directions, part.gradients, strict=True)]
        divergences += [p * float(part.group["lr"]) ** 2 for p in products]
    for part, directions in moves:
        total = torch.stack([d.to(directions[0].device) for d in divergences]).sum()
        scale = (float(part.group["kl_clip"]) / total.clamp(min=torch.finfo(total.dtype).tiny)).sqrt()
        torch._foreach_mul_(directions, scale.clamp(max=1.0))


def _momentum_step(part: Part, directions: list[Tensor]) -> None:
    """``v ← μ v + d``, ``W ← W − lr · v`` (Nesterov: ``W ← W − lr · (d + μ v)``)."""
    momentum = float(part.group["momentum"])
    if momentum:
        torch._foreach_mul_(part.buffers, momentum)
        torch._foreach_add_(part.buffers, directions)
        nesterov = bool(part.group["nesterov"])
        directions = list(torch._foreach_add(directions, part.buffers, alpha=momentum)) if nesterov else part.buffers
    torch._foreach_add_(list[Tensor](part.params), directions, alpha=-float(part.group["lr"]))
