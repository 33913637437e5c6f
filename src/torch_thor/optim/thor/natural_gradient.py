"""From gradients to weights: the natural gradient; weight decay; the bound on the step; momentum, in this order.

What is not preconditioned takes the step of :class:`torch.optim.SGD`, rounded as that rounds it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import scale_
from torch_thor.curvature.precision import factor_dtype
from torch_thor.optim.parameters import Group, ParameterIndex, Share, with_gradient
from torch_thor.optim.thor.step_bound import by_device, kl_divergence, kl_scale, relative_scale, relative_scales


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

    @property
    def on_cpu(self) -> bool:
        """Whether all of them are on the CPU."""
        return all(p.device.type == "cpu" for p in self.params)

    @property
    def gradient_scale(self) -> float:
        """What gradients are multiplied by: 1 / N where the loss is a sum that was taken for a mean."""
        return 1.0 / float(self.group["loss_scale"])

    def pieces(self) -> Iterator["Part"]:
        """Yield the parameters one by one.

        Yields:
            Parts of one parameter.
        """
        for i in range(len(self.params)):
            one = slice(i, i + 1)
            yield Part(self.group, self.params[one], self.decaying[one], self.buffers[one], self.shares[one])


def update(
    groups: list[Group],
    index: ParameterIndex,
    buffer_of: Callable[[nn.Parameter], Tensor],
    decays: Callable[[nn.Parameter], bool],
) -> None:
    """Update every parameter that has a gradient.

    Args:
        groups: parameter groups.
        index: which layer preconditions which parameter.
        buffer_of: returns a parameter's momentum buffer.
        decays: whether weight decay applies to a parameter.
    """
    clipped: list[tuple[Part, list[Tensor]]] = []
    for group in groups:
        natural, plain = _parts(group, index, buffer_of, decays)
        if plain.params:
            _update_plain(plain)
        if not natural.params:
            continue
        if group["kl_clip"] is None and natural.buffers and not group["nesterov"] and natural.on_cpu:
            _update_one_by_one(natural)
            continue
        directions = [torch.empty_like(p, dtype=factor_dtype(p.dtype)) for p in natural.params]
        _accumulate_natural_gradients_(natural, directions, 0.0)
        _add_weight_decay_(natural, directions)
        if group["kl_clip"] is None:
            _momentum_step(natural, _bounded(natural, directions))
        else:
            clipped.append((natural, directions))
    if clipped:
        divergence = kl_divergence([(d, p.gradients, p.group) for p, d in clipped])
    for part, directions in clipped:
        torch._foreach_mul_(directions, kl_scale(divergence, part.group))
        _momentum_step(part, _bounded(part, directions))


def _parts(
    group: Group,
    index: ParameterIndex,
    buffer_of: Callable[[nn.Parameter], Tensor],
    decays: Callable[[nn.Parameter], bool],
) -> tuple[Part, Part]:
    natural, plain = (Part(group, [], [], [], []) for _ in range(2))
    for _, parameter, _ in with_gradient([group]):
        shares = index.shares(parameter)
        part = plain
        if any(share.layer.refreshes for share in shares):
            part = natural
            part.shares.append(shares)
        part.params.append(parameter)
        part.decaying.append(bool(group["weight_decay"]) and decays(parameter))
        if group["momentum"]:
            part.buffers.append(buffer_of(parameter))
    return natural, plain


def _update_plain(part: Part) -> None:
    directions = []
    for parameter, gradient, decaying in zip(part.params, part.gradients, part.decaying, strict=True):
        # a copy only where something would change the user's gradient, or its precision is below the momentum's
        copied = decaying or part.gradient_scale != 1.0
        directions.append(gradient.to(factor_dtype(parameter.dtype), copy=copied))
    if part.gradient_scale != 1.0:
        torch._foreach_mul_(directions, part.gradient_scale)
    _add_weight_decay_(part, directions)
    _momentum_step(part, _bounded(part, directions))


def _update_one_by_one(natural: Part) -> None:
    """On a CPU one parameter at a time, while it and its direction are in cache: one pass over memory for the model."""
    momentum, lr, ratio = (natural.group[key] for key in ("momentum", "lr", "max_update_ratio"))
    scratch: dict[torch.dtype, Tensor] = {}  # one piece of memory for all directions: a fresh one costs page faults
    if ratio is not None:
        for dtype in {b.dtype for b in natural.buffers}:
            scratch[dtype] = torch.empty(max(b.numel() for b in natural.buffers if b.dtype == dtype), dtype=dtype)
    for part in natural.pieces():
        buffer = part.buffers[0]
        if ratio is None:  # v ← μ v + d with d added block by block, never formed
            _accumulate_natural_gradients_(part, part.buffers, float(momentum))
            _add_weight_decay_(part, part.buffers)
        else:
            direction = scratch[buffer.dtype][: buffer.numel()].as_strided(buffer.shape, buffer.stride())
            _accumulate_natural_gradients_(part, [direction], 0.0)
            _add_weight_decay_(part, [direction])
            scale = relative_scale(part.params[0], direction, float(lr), float(ratio))
            if scale != 1.0:
                direction.mul_(scale)
            torch.add(direction, buffer, alpha=float(momentum), out=buffer)  # one pass, where mul_ and add_ are two
        torch._foreach_add_(list[Tensor](part.params), part.buffers, alpha=-float(lr))


def _bounded(part: Part, directions: list[Tensor]) -> list[Tensor]:
    """Return the directions, those that are too long for their parameter shortened; never in place."""
    ratio, lr = part.group["max_update_ratio"], float(part.group["lr"])
    if ratio is None or not lr:
        return directions
    bounded = list(directions)
    for members in by_device(directions):
        chosen = [directions[i] for i in members]
        scales = relative_scales([part.params[i] for i in members], chosen, lr, float(ratio))
        if scales is not None:
            for i, direction in zip(members, torch._foreach_mul(chosen, list(scales.unbind())), strict=True):
                bounded[i] = direction
    return bounded


def _accumulate_natural_gradients_(part: Part, into: list[Tensor], decay: float) -> None:
    scale = part.gradient_scale
    for shares, gradient, target in zip(part.shares, part.given_gradients, into, strict=True):
        for rows in _rows_of_nobody(shares, len(target)):
            scale_(target[rows], decay).add_(gradient[rows], alpha=scale)
        for share in shares:
            ours, theirs = share.piece.of(gradient), share.piece.of(target)
            if not share.layer.refreshes:  # one projection of a fused weight may have none while the others do
                scale_(theirs, decay).add_(ours, alpha=scale)
            elif share.is_weight:
                share.layer.accumulate_natural_gradient_(ours, theirs, decay, scale)
            else:
                share.layer.accumulate_natural_bias_gradient_(ours, theirs, decay, scale)


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


def _momentum_step(part: Part, directions: list[Tensor]) -> None:
    """``v ← μ v + d``, ``W ← W − lr · v`` (Nesterov: ``W ← W − lr · (d + μ v)``)."""
    momentum = float(part.group["momentum"])
    if momentum:
        torch._foreach_mul_(part.buffers, momentum)
        torch._foreach_add_(part.buffers, directions)
        nesterov = bool(part.group["nesterov"])
        directions = list(torch._foreach_add(directions, part.buffers, alpha=momentum)) if nesterov else part.buffers
    torch._foreach_add_(list[Tensor](part.params), directions, alpha=-float(part.group["lr"]))
