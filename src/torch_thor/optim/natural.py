"""The update rule of the paper: natural gradient, weight decay, the bound on the step and momentum, in this order.

Parameters that are not preconditioned take the step of :class:`torch.optim.SGD`, with the same rounding.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.blocks import scale_
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import factor_dtype, ieee_float32
from torch_thor.curvature.shards import local
from torch_thor.distributed.divided import ALL_AT_ONCE, DividedInverses
from torch_thor.optim.parameters import Group, States
from torch_thor.optim.plan import Plan, Share, free_rows


@dataclass
class _Part:
    """The parameters of one group that are preconditioned, or those that are not; only those with a gradient."""

    group: Group  # their parameter group
    params: list[Tensor] = field(default_factory=list)  # the parameters
    gradients: list[Tensor] = field(default_factory=list)  # their gradients, which are not changed
    divided: list[bool] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)  # their momentum buffers; empty if momentum is 0
    shares: list[Sequence[Share]] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)  # the `id` of each parameter
    on_cpu: bool = True  # whether all parameters are on the CPU
    total: Callable[[Tensor | None], Tensor] | None = None

    def dense_gradients(self) -> list[Tensor]:
        """Return the gradients as dense tensors."""
        return [g.to_dense() if g.is_sparse else g for g in self.gradients]


def natural_step(groups: list[Group], plan: Plan, states: States, inverses: DividedInverses | None) -> None:
    """Update every parameter that has a gradient."""
    clipped: list[tuple[_Part, list[Tensor]]] = []
    for group in groups:
        natural, plain = _parts(group, plan, states)
        if plain.params:
            _update_plain(plain)
        clips = group["kl_clip"] is not None
        turns = ALL_AT_ONCE if inverses is None else inverses.turns(group, plan)
        if not clips and natural.buffers and not group["nesterov"] and natural.on_cpu:
            _update_one_by_one(natural, turns)
            continue
        directions = [torch.empty_like(p, dtype=factor_dtype(p.dtype)) for p in natural.params]
        for ready in turns:
            for i, direction in enumerate(directions):
                if ready is None or natural.keys[i] in ready:
                    _accumulate_direction_(natural, i, direction, 0.0)
        if directions and group["weight_decay"]:
            torch._foreach_add_(directions, natural.params, alpha=float(group["weight_decay"]))
        if clips:
            clipped.append((natural, directions))
        elif directions:
            _momentum_step(natural, _bounded(natural, directions))
    clipped = [(part, directions) for part, directions in clipped if directions or part.total is not None]
    if clipped:
        divergence = _kl_divergence(clipped, plan)
    for part, directions in clipped:
        if directions:
            torch._foreach_mul_(directions, kl_scale(divergence, part.group).to(directions[0].dtype))
        _momentum_step(part, directions)


def momentum_buffer(parameter: Tensor, state: dict[str, Any]) -> Tensor:
    """Return the momentum buffer of a parameter; it is made where momentum has been 0 so far."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter, dtype=factor_dtype(parameter.dtype))
    buffer: Tensor = state["momentum_buffer"]
    return buffer


def _parts(group: Group, plan: Plan, states: States) -> tuple[_Part, _Part]:
    natural, plain = _Part(group), _Part(group)
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        part, own, shares = plain, local(parameter), plan.shares_of.get(id(parameter), ())
        for share in shares:
            if share.layer.refreshes:
                part = natural
                if share.view.shards is not None:
                    part.total = share.view.shards.total
                break
        if not own.numel():  # a shard without rows
            continue
        part.shares.append(shares)
        part.keys.append(id(parameter))
        part.divided.append(own is not parameter)
        part.params.append(own)
        part.on_cpu = part.on_cpu and own.device.type == "cpu"
        part.gradients.append(local(gradient))
        if group["momentum"]:
            part.buffers.append(local(momentum_buffer(parameter, states[parameter])))
    return natural, plain


def _kl_divergence(clipped: Sequence[tuple[_Part, list[Tensor]]], plan: Plan) -> Tensor:
    """Return ``Σ lr² ⟨d, ∇⟩`` over all processes, twice the predicted Kullback–Leibler divergence of a step."""
    products: dict[bool, list[tuple[int, Tensor]]] = {False: [], True: []}  # of rows that are divided, and others
    order = {key: i for i, key in enumerate(plan.names)}  # the sum does not depend on how parameters are grouped
    total = None
    for part, directions in clipped:
        total, lr = total or part.total, float(part.group["lr"])
        for i, (direction, gradient) in enumerate(zip(directions, part.dense_gradients(), strict=True)):
            products[part.divided[i]].append((order[part.keys[i]], torch.sum(direction * gradient) * lr**2))
    sums = {
        divided: _sum([p for _, p in sorted(found, key=lambda pair: pair[0])]) for divided, found in products.items()
    }
    if total is None:
        found: Tensor = sums[False]
        return found
    of_all = total(sums[True])
    return of_all if sums[False] is None else of_all + sums[False].to(of_all)


def _sum(products: Sequence[Tensor]) -> Any:
    return torch.stack([p.to(products[0].device) for p in products]).sum() if products else None


def _update_plain(part: _Part) -> None:
    directions = []
    for parameter, gradient in zip(part.params, part.dense_gradients(), strict=True):
        # copied only if it is changed below, or if the momentum has a higher precision
        directions.append(gradient.to(factor_dtype(parameter.dtype), copy=bool(part.group["weight_decay"])))
    if part.group["weight_decay"]:
        torch._foreach_add_(directions, part.params, alpha=float(part.group["weight_decay"]))
    _momentum_step(part, directions if part.group["kl_clip"] is not None else _bounded(part, directions))


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
    if ratio is None:  # v ← μ v + d, where d is added to v block by block and never stored
        _accumulate_direction_(natural, i, buffer, momentum)
        if group["weight_decay"]:
            buffer.add_(parameter, alpha=float(group["weight_decay"]))
    else:
        scratch = memory.get(buffer.dtype)
        if scratch is None or scratch.numel() < buffer.numel():
            scratch = memory[buffer.dtype] = torch.empty(buffer.numel(), dtype=buffer.dtype)
        direction = scratch[: buffer.numel()].as_strided(buffer.shape, buffer.stride())
        _accumulate_direction_(natural, i, direction, 0.0)
        if group["weight_decay"]:
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
    shares, gradient = part.shares[i], part.gradients[i]
    if shares[0].view.local_rows is not None:
        for free in free_rows([share.view.local_rows for share in shares], len(target)):
            scale_(target[free], decay).add_(gradient[free])
    for share in shares:
        layer, rows = share.layer, share.view.local_rows
        if rows is not None and rows.start == rows.stop:  # another process holds these rows
            continue
        source, into = (gradient, target) if rows is None else (gradient[rows], target[rows])
        if not layer.refreshes:  # one projection of a fused weight may have no factors yet
            scale_(into, decay).add_(source)
        elif share.is_weight:
            _accumulate_natural_gradient_(layer, source, into, decay)
        else:
            _accumulate_natural_bias_gradient_(layer, source, into, decay)


def _accumulate_natural_gradient_(layer: LayerCurvature, gradient: Tensor, into: Tensor, decay: float) -> None:
    """Compute ``into ← decay * into + (1/T) · G_d⁻¹ ∇W A_d⁻¹``, which can update a momentum buffer at once."""
    if gradient.is_sparse and layer.kind.diagonal_input and gradient.sparse_dim() == 1:
        _accumulate_rows_(layer, gradient.coalesce(), into, decay)
        return
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    (right, left), geometry = (factor.inverse() for factor in layer.stored), layer.geometry
    if geometry.transposed:
        left, right = right, left
    matrix, target = geometry.to_matrix(gradient), geometry.to_matrix(into)
    with ieee_float32(gradient.device.type):
        solved = left.left_multiply(matrix.to(left.dtype))
        right.accumulate_right_product_(solved, 1.0 / layer.rows_per_term, target, decay)
    geometry.from_matrix_(target, into)


def _accumulate_rows_(layer: LayerCurvature, gradient: Tensor, into: Tensor, decay: float) -> None:
    """Do the same for the sparse gradient of an embedding, which changes the rows of its tokens only."""
    a_inverse, g_inverse = (factor.inverse() for factor in layer.stored)
    tokens, rows = gradient.indices()[0], gradient.values().to(a_inverse.dtype)
    scaled = rows * a_inverse.rows[tokens]
    solved = torch.zeros_like(scaled)
    with ieee_float32(gradient.device.type):
        g_inverse.accumulate_right_product_(scaled[None], 1.0 / layer.rows_per_term, solved[None], 0.0)
    scale_(into, decay).index_add_(0, tokens, solved)


def _accumulate_natural_bias_gradient_(layer: LayerCurvature, gradient: Tensor, into: Tensor, decay: float) -> None:
    """Compute ``into ← decay * into + (1/T) · G_d⁻¹ ∇b``: a bias has the constant input 1, so its A is 1."""
    g_inverse = layer.stored[1].inverse()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    column = gradient.to(g_inverse.dtype).reshape(g_inverse.cut.groups, -1, 1)
    with ieee_float32(gradient.device.type):
        solved = g_inverse.left_multiply(column)
    if layer.kind.routed:
        # 1 / T of each expert, of which its G contains one √T, and the A of a bias none
        terms = layer.state[layer.prefix + "group_rows_per_term"]
        solved *= torch.where(terms > 0, terms, 1.0).rsqrt()[:, None, None]
    scale_(into, decay).add_(solved.reshape(into.shape), alpha=1.0 / layer.rows_per_term)


def _momentum_step(part: _Part, directions: list[Tensor]) -> None:
    """Compute ``v ← μ v + d`` and ``W ← W − lr · v`` (Nesterov: ``W ← W − lr · (d + μ v)``)."""
    momentum = float(part.group["momentum"])
    if momentum:
        torch._foreach_mul_(part.buffers, momentum)
        torch._foreach_add_(part.buffers, directions)
        nesterov = bool(part.group["nesterov"])
        directions = list(torch._foreach_add(directions, part.buffers, alpha=momentum)) if nesterov else part.buffers
    torch._foreach_add_(part.params, directions, alpha=-float(part.group["lr"]))


# ---- bounds on the length of a step ----------------------------------------------------------------------------------

# A weight of zeros (a zero-initialised residual branch, a LoRA adapter) must be able to move, so its norm counts as at
# least this number times √d_out. That is a twentieth of the norm of a newly initialised linear layer, √(d_out / 3).
SMALLEST_SHARE = 0.03


def smallest_norm(parameter: Tensor) -> float:
    """Return the smallest norm that is assumed for a parameter."""
    for size in parameter.shape:
        if size != 1:
            return SMALLEST_SHARE * math.sqrt(size)
    return SMALLEST_SHARE


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group tensors that can be measured together."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    return list(groups.values())


def relative_scales(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], lr: float, ratio: float
) -> Tensor | None:
    """Return the factors by which directions are multiplied so that no step is too long for its parameter."""
    if directions[0].device.type == "cpu":
        scales = [relative_scale(p, d, lr, ratio) for p, d in zip(parameters, directions, strict=True)]
        return None if all(scale == 1.0 for scale in scales) else torch.tensor(scales, dtype=directions[0].dtype)
    lengths = torch.stack(list(torch._foreach_norm(list(directions)))) * lr
    # in the dtype of the directions: a norm in half precision has 3 digits and may overflow
    norms = torch.stack(list(torch._foreach_norm(list(parameters), 2, dtype=directions[0].dtype)))
    smallest = torch.tensor([smallest_norm(p) for p in parameters], dtype=lengths.dtype, device=lengths.device)
    longest = ratio * torch.maximum(norms, smallest)
    return (longest / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)).clamp(max=1.0)


def relative_scale(parameter: Tensor, direction: Tensor, lr: float, ratio: float) -> float:
    """Return the factor by which a direction on the CPU is multiplied so that the step is not too long."""
    length = lr * _norm(direction, direction.dtype)
    longest = ratio * smallest_norm(parameter)
    if length <= longest:  # then the norm of the parameter, which can only raise the bound, is not needed
        return 1.0
    longest = max(longest, ratio * _norm(parameter, direction.dtype))
    return 1.0 if length <= longest else longest / length


def _norm(tensor: Tensor, dtype: torch.dtype) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=dtype))


def kl_scale(divergence: Tensor, group: Group) -> Tensor:
    """Return the factor by which the directions of a group are multiplied, ``min(1, √(κ / Σ lr² ⟨d, ∇⟩))``."""
    limit = float(group["kl_clip"]) / divergence.clamp(min=torch.finfo(divergence.dtype).tiny)
    return limit.sqrt().clamp(max=1.0)
