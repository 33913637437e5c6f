"""The update rule of the paper: natural gradient, weight decay, the bound on the step and momentum, in this order.

Parameters that are not preconditioned take the step of :class:`torch.optim.SGD`, with the same rounding.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.blocks import scale_
from torch_thor.curvature.experts import bias_scales
from torch_thor.curvature.layer import SIDES, LayerCurvature
from torch_thor.curvature.precision import factor_dtype, ieee_float32
from torch_thor.curvature.row_shards import local
from torch_thor.optim.divided_curvature import ALL_AT_ONCE, DividedInverses
from torch_thor.optim.parameter_index import ParameterIndex, Share, free_rows
from torch_thor.optim.parameters import Group, States
from torch_thor.optim.step_bound import by_device, kl_divergence, kl_scale, relative_scale, relative_scales


@dataclass
class _Part:
    """The parameters of one group that are preconditioned, or those that are not; only those with a gradient."""

    group: Group  # their parameter group
    scale: float  # the number that multiplies the gradients: 1 / N if the loss is a sum, else 1
    params: list[Tensor] = field(default_factory=list)  # the parameters
    gradients: list[Tensor] = field(default_factory=list)  # their gradients, which are not changed
    decaying: list[bool] = field(default_factory=list)  # for each parameter, whether weight decay applies to it
    divided: list[bool] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)  # their momentum buffers; empty if momentum is 0
    shares: list[Sequence[Share]] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)  # the `id` of each parameter, in the same case
    on_cpu: bool = True  # whether all parameters are on the CPU
    total: Callable[[Tensor | None], Tensor] | None = None

    def dense_gradients(self) -> list[Tensor]:
        """Return the gradients as dense tensors."""
        return [g.to_dense() if g.is_sparse else g for g in self.gradients]


class NaturalGradient:
    """The natural gradient ``(1/T) · (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹``, bounded, with momentum as in SGD."""

    sides: tuple[str, ...] = SIDES
    relative_damping: bool = False

    def make_state(self, index: ParameterIndex, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        """Add the momentum buffer, unless momentum is 0."""
        if group["momentum"] and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=factor_dtype(parameter.dtype))

    def update(
        self,
        groups: list[Group],
        index: ParameterIndex,
        states: States,
        decaying: frozenset[int],
        inverses: DividedInverses | None,
    ) -> None:
        """Update every parameter that has a gradient."""
        clipped: list[tuple[_Part, list[Tensor]]] = []
        for group in groups:
            natural, plain = self._parts(group, index, states, decaying)
            if plain.params:
                _update_plain(plain)
            plainly_bounded = group["kl_clip"] is None
            turns = ALL_AT_ONCE if inverses is None else inverses.turns(group, index)
            if plainly_bounded and natural.buffers and not group["nesterov"] and natural.on_cpu:
                _update_one_by_one(natural, turns)
                continue
            directions = [torch.empty_like(p, dtype=factor_dtype(p.dtype)) for p in natural.params]
            for ready in turns:
                for i, direction in enumerate(directions):
                    if ready is None or natural.keys[i] in ready:
                        _accumulate_direction_(natural, i, direction, 0.0)
            if not natural.params and (natural.total is None or plainly_bounded):
                continue
            if True in natural.decaying:
                _add_weight_decay_(natural, directions)
            if plainly_bounded:
                _momentum_step(natural, _bounded(natural, directions))
            else:
                clipped.append((natural, directions))
        if clipped:
            divergence = _kl_divergence(clipped)
        for part, directions in clipped:
            if directions:
                torch._foreach_mul_(directions, kl_scale(divergence, part.group).to(directions[0].dtype))
            _momentum_step(part, _bounded(part, directions))

    def _parts(
        self, group: Group, index: ParameterIndex, states: States, decaying: frozenset[int]
    ) -> tuple[_Part, _Part]:
        scale = 1.0 / float(group["loss_scale"])
        natural, plain = _Part(group, scale), _Part(group, scale)
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            part, own, shares = plain, local(parameter), index.shares_of.get(id(parameter), ())
            for share in shares:
                if share.layer.refreshes:
                    part = natural
                    if share.view.shards is not None:
                        part.total = share.view.shards.total
                    break
            if not own.numel():  # a shard without rows
                continue
            if part is natural:
                part.shares.append(shares)
                part.keys.append(id(parameter))
            part.divided.append(own is not parameter)
            part.params.append(own)
            part.on_cpu = part.on_cpu and own.device.type == "cpu"
            part.gradients.append(local(gradient))
            part.decaying.append(id(parameter) in decaying)
            if group["momentum"]:
                state = states[parameter]
                if "momentum_buffer" not in state:  # momentum has been 0 so far
                    self.make_state(index, parameter, state, group)
                part.buffers.append(local(state["momentum_buffer"]))
        return natural, plain


def _kl_divergence(clipped: Sequence[tuple[_Part, list[Tensor]]]) -> Tensor:
    """Return ``Σ lr² ⟨d, ∇⟩`` over all layers; if parameters are divided among processes, over the rows of all."""
    sums: dict[bool, Tensor] = {}
    total = None
    for divided in (False, True):
        parts = []
        for part, directions in clipped:
            total = total or part.total
            chosen = [i for i, one in enumerate(part.divided) if one is divided]
            gradients = part.dense_gradients()
            if chosen:
                parts.append(([directions[i] for i in chosen], [gradients[i] for i in chosen], part.group))
        if parts:
            sums[divided] = kl_divergence(parts)
    if total is None:
        return sums[False]
    of_all = total(sums.get(True))
    return of_all + sums[False].to(of_all) if False in sums else of_all


def _update_plain(part: _Part) -> None:
    directions = []
    for parameter, given, decaying in zip(part.params, part.gradients, part.decaying, strict=True):
        gradient = given.to_dense() if given.is_sparse else given
        # copied only if it is changed below, or if the momentum has a higher precision
        copied = decaying or part.scale != 1.0
        directions.append(gradient.to(factor_dtype(parameter.dtype), copy=copied))
    if part.scale != 1.0:
        torch._foreach_mul_(directions, part.scale)
    if True in part.decaying:
        _add_weight_decay_(part, directions)
    _momentum_step(part, _bounded(part, directions))


def _update_one_by_one(natural: _Part, turns: Iterable[frozenset[int] | None]) -> None:
    """Update one parameter at a time, for a CPU: the parameter and its direction then stay in the cache."""
    memory: dict[torch.dtype, Tensor] = {}  # shared by all directions, because each new allocation costs page faults
    for ready in turns:
        for i, key in enumerate(natural.keys):
            if ready is None or key in ready:
                _update_one(natural, i, memory)


def _update_one(natural: _Part, i: int, memory: dict[torch.dtype, Tensor]) -> None:
    group, parameter, buffer = natural.group, natural.params[i], natural.buffers[i]
    momentum, lr, ratio = float(group["momentum"]), float(group["lr"]), group["max_update_ratio"]
    momentum, lr, ratio = float(group["momentum"]), float(group["lr"]), group["max_update_ratio"]
    if ratio is None:  # v ← μ v + d, where d is added to v block by block and never stored
        _accumulate_direction_(natural, i, buffer, momentum)
        if natural.decaying[i]:
            buffer.add_(parameter, alpha=float(group["weight_decay"]))
    else:
        scratch = memory.get(buffer.dtype)
        if scratch is None or scratch.numel() < buffer.numel():
            scratch = memory[buffer.dtype] = torch.empty(buffer.numel(), dtype=buffer.dtype)
        direction = scratch[: buffer.numel()].as_strided(buffer.shape, buffer.stride())
        _accumulate_direction_(natural, i, direction, 0.0)
        if natural.decaying[i]:
            direction.add_(parameter, alpha=float(group["weight_decay"]))
        scale = relative_scale(parameter, direction, lr, float(ratio))
        if scale != 1.0:
            direction.mul_(scale)
        torch.add(direction, buffer, alpha=momentum, out=buffer)  # one pass over memory; mul_ and add_ take two
    torch._foreach_add_([parameter], [buffer], alpha=-lr)


def _bounded(part: _Part, directions: list[Tensor]) -> list[Tensor]:
    """Return the directions with ``max_update_ratio`` applied; directions are not changed in place."""
    ratio, lr = part.group["max_update_ratio"], float(part.group["lr"])
    if ratio is None or not lr:
        return directions
    bounded = list(directions)
    if part.on_cpu:
        for i, (parameter, direction) in enumerate(zip(part.params, directions, strict=True)):
            scale = relative_scale(parameter, direction, lr, float(ratio))
            if scale != 1.0:
                bounded[i] = direction * scale
        return bounded
    for members in by_device(directions):
        chosen = [directions[i] for i in members]
        scales = relative_scales([part.params[i] for i in members], chosen, lr, float(ratio))
        if scales is not None:
            for i, direction in zip(members, torch._foreach_mul(chosen, list(scales.unbind())), strict=True):
                bounded[i] = direction
    return bounded


def _accumulate_direction_(part: _Part, i: int, target: Tensor, decay: float) -> None:
    """Compute ``target ← decay * target + d``, where d is the natural gradient of the i-th parameter."""
    shares, gradient, scale = part.shares[i], part.gradients[i], part.scale
    if shares[0].view.local_rows is not None:
        for free in free_rows([share.view.local_rows for share in shares], len(target)):
            scale_(target[free], decay).add_(gradient[free], alpha=scale)
    for share in shares:
        layer, rows = share.layer, share.view.local_rows
        if rows is not None and rows.start == rows.stop:  # another process holds these rows
            continue
        source, into = (gradient, target) if rows is None else (gradient[rows], target[rows])
        if not layer.refreshes:  # one projection of a fused weight may have no factors yet
            scale_(into, decay).add_(source, alpha=scale)
        elif share.is_weight:
            _accumulate_natural_gradient_(layer, source, into, decay, scale)
        else:
            _accumulate_natural_bias_gradient_(layer, source, into, decay, scale)


def _accumulate_natural_gradient_(
    layer: LayerCurvature, gradient: Tensor, into: Tensor, decay: float, scale: float
) -> None:
    """Compute ``into ← decay * into + (scale/T) · G_d⁻¹ ∇W A_d⁻¹``, which can update a momentum buffer at once."""
    if gradient.is_sparse and layer.kind.diagonal_input and gradient.sparse_dim() == 1:
        _accumulate_rows_(layer, gradient.coalesce(), into, decay, scale)
        return
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    left, right, geometry = layer.inverse("G"), layer.inverse("A"), layer.geometry
    if geometry.transposed:
        left, right = right, left
    matrix, target = geometry.to_matrix(gradient), geometry.to_matrix(into)
    with ieee_float32(gradient.device.type):
        solved = left.left_multiply(matrix.to(left.blocks.dtype))
        right.accumulate_right_product_(solved, scale / layer.rows_per_term, target, decay)
    geometry.from_matrix_(target, into)


def _accumulate_rows_(layer: LayerCurvature, gradient: Tensor, into: Tensor, decay: float, scale: float) -> None:
    """Do the same for the sparse gradient of an embedding, which changes the rows of its tokens only."""
    a_inverse, g_inverse = layer.inverse("A"), layer.inverse("G")
    tokens, rows = gradient.indices()[0], gradient.values().to(a_inverse.blocks.dtype)
    scaled = rows * a_inverse.blocks.view(-1)[tokens, None]
    solved = torch.zeros_like(scaled)
    with ieee_float32(gradient.device.type):
        g_inverse.accumulate_right_product_(scaled[None], scale / layer.rows_per_term, solved[None], 0.0)
    scale_(into, decay).index_add_(0, tokens, solved)


def _accumulate_natural_bias_gradient_(
    layer: LayerCurvature, gradient: Tensor, into: Tensor, decay: float, scale: float
) -> None:
    """Compute ``into ← decay * into + (scale/T) · G_d⁻¹ ∇b``: a bias has the constant input 1, so its A is 1."""
    g_inverse = layer.inverse("G")
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    column = gradient.to(g_inverse.blocks.dtype).reshape(g_inverse.layout.groups, g_inverse.layout.size, 1)
    with ieee_float32(gradient.device.type):
        solved = g_inverse.left_multiply(column)
    if layer.kind.routed:
        solved *= bias_scales(layer.state[layer.prefix + "group_rows_per_term"])[:, None, None]
    scale_(into, decay).add_(solved.reshape(into.shape), alpha=scale / layer.rows_per_term)


def _add_weight_decay_(part: _Part, directions: list[Tensor]) -> None:
    weights: list[Tensor] = []
    chosen: list[Tensor] = []
    for parameter, direction, decaying in zip(part.params, directions, part.decaying, strict=True):
        if decaying:
            weights.append(parameter)
            chosen.append(direction)
    torch._foreach_add_(chosen, weights, alpha=float(part.group["weight_decay"]))


def _momentum_step(part: _Part, directions: list[Tensor]) -> None:
    """Compute ``v ← μ v + d`` and ``W ← W − lr · v`` (Nesterov: ``W ← W − lr · (d + μ v)``)."""
    momentum = float(part.group["momentum"])
    if momentum:
        torch._foreach_mul_(part.buffers, momentum)
        torch._foreach_add_(part.buffers, directions)
        nesterov = bool(part.group["nesterov"])
        directions = list(torch._foreach_add(directions, part.buffers, alpha=momentum)) if nesterov else part.buffers
    torch._foreach_add_(part.params, directions, alpha=-float(part.group["lr"]))
