"""The paper's update: natural gradient, weight decay, bound on the step, momentum, in this order.

Parameters that are not preconditioned take the step of :class:`torch.optim.SGD`, with the same
rounding. The natural gradient of early, low-rank factors can be many times longer than the weights,
and without a bound most networks that were not tuned for it diverge within a few steps. There are
two bounds, both applied before momentum:

- relative to each parameter (the default): ``lr · ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out)``. LARS (You et
  al. 2017, section 4) gives every layer a step of that proportion; used as a limit, it leaves a
  shorter natural gradient as it is.
- over all preconditioned layers (``kl_clip``): ``Σ lr² ⟨d, ∇⟩ ≤ κ`` (Ba et al. 2017, section 5).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.blocks import factor_dtype, ieee_float32
from torch_thor.curvature.factor import Factor, local
from torch_thor.curvature.kinds.base import Kind
from torch_thor.distributed.divided import collected_turns, is_divided
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.parameters import Group
from torch_thor.optim.plan import Plan, free_rows

# A weight of zeros (a zero-initialised residual branch, a LoRA adapter) must be able to move, so
# its norm counts as at least this number times √d_out. That is a twentieth of the norm of a newly
# initialised linear layer, √(d_out / 3).
SMALLEST_SHARE = 0.03


@dataclass
class _Piece:
    """Rows of a parameter, and how they are preconditioned."""

    rows: slice | None  # None for all
    kind: Kind | None = None  # None where the rows take their plain gradient
    # those on the left and on the right of a weight, or the one of a bias
    factors: Sequence[Factor] = ()
    scale: float = 1.0  # 1 / T
    scales: Tensor | None = None  # 1 / T of each expert, for a bias


@dataclass
class _Work:
    """A trained parameter with all that its steps need until the next refresh."""

    parameter: Tensor
    own: Tensor  # the rows that this process holds
    state: dict[str, Any]
    pieces: list[_Piece]  # none if the parameter is not preconditioned
    dtype: torch.dtype  # of directions and momentum
    smallest: float  # the smallest norm that is assumed for the bound
    order: int  # its place in the model
    # the momentum of the own rows; None where momentum has been 0 so far
    buffer: Tensor | None = None


def natural_step(optimizer: CurvatureOptimizer, plan: Plan) -> None:
    """Update every parameter that has a gradient."""
    if plan.program is None:
        plan.program = [_prepared(group, plan, optimizer.state) for group in optimizer.param_groups]
    clipped: list[tuple[Group, list[_Work], list[Tensor], list[Tensor]]] = []
    divided = optimizer._distributed.divide_curvature and is_divided(plan.layers.values())
    # shared by all directions, because each new allocation costs page faults
    memory: dict[torch.dtype, Tensor] = {}
    for group, program in zip(optimizer.param_groups, plan.program, strict=True):
        plain: list[_Work] = []
        natural: list[_Work] = []
        directions: list[Tensor] = []
        gradients: list[Tensor] = []
        on_cpu = True
        for work in program:
            gradient = work.parameter.grad
            if gradient is None:
                continue
            gradient = gradient if work.own is work.parameter else local(gradient)
            if work.buffer is None and group["momentum"]:
                if "momentum_buffer" not in work.state:  # momentum was 0 so far
                    optimizer._make_parameter_state(work.parameter, work.state, group)
                buffer = work.state["momentum_buffer"]
                work.buffer = buffer if work.own is work.parameter else local(buffer)
            if work.pieces:
                natural.append(work)
                gradients.append(gradient)
                on_cpu = on_cpu and gradient.device.type == "cpu"
                continue
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            plain.append(work)
            # copied only if it is changed below, or if the momentum has a higher precision
            directions.append(gradient.to(work.dtype, copy=bool(group["weight_decay"])))
        if plain:
            _step(group, plain, directions, None)
        directions = []
        one_by_one = (
            on_cpu and group["momentum"] and not group["nesterov"] and group["kl_clip"] is None
        )
        for ready in collected_turns(group, plan) if divided else (None,):
            for work, gradient in zip(natural, gradients, strict=True):
                if ready is not None and id(work.parameter) not in ready:
                    continue
                if one_by_one:
                    _update_one(group, work, gradient, memory)
                else:
                    directions.append(torch.empty_like(work.own, dtype=work.dtype))
                    _accumulate_direction_(work, gradient, directions[-1], 0.0)
        if group["kl_clip"] is not None:
            clipped.append((group, natural, directions, gradients))
        elif directions:
            _step(group, natural, directions, None)
    if clipped:
        _clip(clipped, None if plan.first_shards is None else plan.first_shards.total)


def _prepared(group: Group, plan: Plan, states: Any) -> list[_Work]:
    """Look up all that the parameters of a group need."""
    found = []
    order = {key: i for i, key in enumerate(plan.names)}
    for parameter in group["params"]:
        own, pieces = local(parameter) if plan.sharded else parameter, []
        shares = plan.shares_of.get(id(parameter), [])
        used = any(share.layer.refreshes for share in shares)
        if used and shares[0].view.local_rows is not None:
            pieces += [
                _Piece(rows)
                for rows in free_rows([share.view.local_rows for share in shares], len(own))
            ]
        for share in shares if used else ():
            layer, rows = share.layer, share.view.local_rows
            if rows is not None and rows.start == rows.stop:  # another process holds these rows
                continue
            if not layer.refreshes:  # one projection of a fused weight may have no factors yet
                pieces.append(_Piece(rows))
                continue
            (a, g), kind, scales = layer.stored, layer.geometry, None
            for factor in (a, g):  # looked up once between refreshes, unless steps collect it
                factor.whole = factor.read(inverse=True) if factor.divided is None else None
            # 1 / T of each expert, of which its G contains one √T, and the A of a bias none
            if kind.routed:
                terms = layer.state[layer.prefix + "group_rows_per_term"]
                scales = torch.where(terms > 0, terms, 1.0).rsqrt()[:, None, None]
            factors = ((a, g) if kind.transposed else (g, a)) if share.is_weight else (g,)
            pieces.append(_Piece(rows, kind, factors, 1.0 / layer.rows_per_term, scales))
        if own.numel():  # else a shard without rows
            size = next((size for size in own.shape if size != 1), 1)
            place, state = order.get(id(parameter), len(order)), states.get(parameter, {})
            smallest, dtype = SMALLEST_SHARE * math.sqrt(size), factor_dtype(own.dtype)
            found.append(_Work(parameter, own, state, pieces, dtype, smallest, place))
    return found


def _update_one(
    group: Group, work: _Work, gradient: Tensor, memory: dict[torch.dtype, Tensor]
) -> None:
    """Update one parameter, for a CPU: the parameter and its direction then stay in the cache."""
    parameter, buffer, ratio = work.own, work.buffer, group["max_update_ratio"]
    assert buffer is not None  # there is momentum
    momentum, lr = float(group["momentum"]), float(group["lr"])
    direction = buffer
    if ratio is not None:
        scratch = memory.get(buffer.dtype)
        if scratch is None or scratch.numel() < buffer.numel():
            scratch = memory[buffer.dtype] = torch.empty(buffer.numel(), dtype=buffer.dtype)
        direction = scratch[: buffer.numel()].as_strided(buffer.shape, buffer.stride())
    # without a bound v ← μ v + d, where d is added to v block by block and never stored
    _accumulate_direction_(work, gradient, direction, momentum if ratio is None else 0.0)
    if group["weight_decay"]:
        direction.add_(parameter, alpha=float(group["weight_decay"]))
    if ratio is not None:
        scale = _scale(work, direction, lr, float(ratio))
        if scale != 1.0:
            direction.mul_(scale)
        # one pass over memory; mul_ and add_ take two
        torch.add(direction, buffer, alpha=momentum, out=buffer)
    torch._foreach_add_([parameter], [buffer], alpha=-lr)


def _step(
    group: Group, works: Sequence[_Work], directions: list[Tensor], clip: Tensor | None
) -> None:
    """Add weight decay to directions, bound them, and take the steps.

    ``v ← μ v + d`` and ``W ← W − lr · v`` (Nesterov: ``W ← W − lr · (d + μ v)``).
    """
    lr, momentum = float(group["lr"]), float(group["momentum"])
    params: list[Tensor] = []
    buffers: list[Tensor] = []
    for work in works:
        params.append(work.own)
        if work.buffer is not None:
            buffers.append(work.buffer)
    if group["weight_decay"] and clip is None:
        torch._foreach_add_(directions, params, alpha=float(group["weight_decay"]))
    if clip is not None:
        torch._foreach_mul_(directions, clip.to(directions[0].dtype))
    elif group["max_update_ratio"] is not None and group["kl_clip"] is None and lr:
        directions = _bounded(works, directions, lr, float(group["max_update_ratio"]))
    if momentum:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, directions)
        directions = (
            list(torch._foreach_add(directions, buffers, alpha=momentum))
            if group["nesterov"]
            else buffers
        )
    torch._foreach_add_(params, directions, alpha=-lr)


def _accumulate_direction_(work: _Work, gradient: Tensor, target: Tensor, decay: float) -> None:
    """Compute ``target ← decay * target + d``, where d is the natural gradient of a parameter."""
    for piece in work.pieces:
        source, into = (
            (gradient, target) if piece.rows is None else (gradient[piece.rows], target[piece.rows])
        )
        kind = piece.kind
        if (
            source.is_sparse
            and source.sparse_dim() == 1
            and kind is not None
            and kind.diagonal_input
        ):
            _accumulate_rows_(piece, source.coalesce(), into, decay)
            continue
        source = source.to_dense() if source.is_sparse else source
        if kind is None:
            (into.mul_(decay) if decay else into.zero_()).add_(source)
            continue
        left = piece.factors[0].whole
        assert left is not None
        with ieee_float32(source.device.type):
            if len(piece.factors) > 1:  # d = (1/T) · G_d⁻¹ ∇W A_d⁻¹, added to the target at once
                solved = left.left_multiply(kind.to_matrix(source).to(left.rows.dtype))
                matrix = kind.to_matrix(into)
                right = piece.factors[1].whole
                assert right is not None
                right.accumulate_right_product_(solved, piece.scale, matrix, decay)
                kind.from_matrix_(matrix, into)
                continue
            # d = (1/T) · G_d⁻¹ ∇b: a bias has the constant input 1, so its A is 1
            solved = left.left_multiply(source.to(left.rows.dtype).reshape(left.cut.groups, -1, 1))
        if piece.scales is not None:
            solved *= piece.scales
        (into.mul_(decay) if decay else into.zero_()).add_(
            solved.reshape(into.shape), alpha=piece.scale
        )


def _accumulate_rows_(piece: _Piece, gradient: Tensor, into: Tensor, decay: float) -> None:
    """Do the same for an embedding's sparse gradient, which changes the rows of its tokens only."""
    a_inverse, g_inverse = piece.factors[0].whole, piece.factors[1].whole
    assert a_inverse is not None
    assert g_inverse is not None
    tokens, rows = gradient.indices()[0], gradient.values().to(a_inverse.rows.dtype)
    scaled = rows * a_inverse.rows[tokens]
    solved = torch.zeros_like(scaled)
    with ieee_float32(gradient.device.type):
        g_inverse.accumulate_right_product_(scaled[None], piece.scale, solved[None], 0.0)
    (into.mul_(decay) if decay else into.zero_()).index_add_(0, tokens, solved)


# ---- bounds on the length of a step --------------------------------------------------------------


def _scale(work: _Work, direction: Tensor, lr: float, ratio: float) -> float:
    """Return the factor by which to multiply a CPU direction, so that the step is not too long."""
    length = lr * float(torch.linalg.vector_norm(direction, dtype=direction.dtype))
    longest = ratio * work.smallest
    # then the norm of the parameter, which can only raise the bound, is not needed
    if length <= longest:
        return 1.0
    longest = max(longest, ratio * float(torch.linalg.vector_norm(work.own, dtype=direction.dtype)))
    return 1.0 if length <= longest else longest / length


def _bounded(
    works: Sequence[_Work], directions: list[Tensor], lr: float, ratio: float
) -> list[Tensor]:
    """Return the directions with ``max_update_ratio`` applied, without changing them in place."""
    bounded = list(directions)
    # those that can be measured together
    others: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (work, direction) in enumerate(zip(works, directions, strict=True)):
        if direction.device.type != "cpu":
            others.setdefault((direction.device, direction.dtype), []).append(i)
            continue
        scale = _scale(work, direction, lr, ratio)
        if scale != 1.0:
            bounded[i] = direction * scale
    for (device, dtype), members in others.items():
        chosen = [directions[i] for i in members]
        lengths = torch.stack(torch._foreach_norm(chosen)) * lr
        # in the dtype of the directions: a norm in half precision has 3 digits and may overflow
        norms = torch.stack(torch._foreach_norm([works[i].own for i in members], 2, dtype=dtype))
        smallest = torch.tensor([works[i].smallest for i in members], dtype=dtype, device=device)
        longest = ratio * torch.maximum(norms, smallest)
        scales = (longest / lengths.clamp(min=torch.finfo(dtype).tiny)).clamp(max=1.0)
        for i, direction in zip(
            members, torch._foreach_mul(chosen, list(scales.unbind())), strict=True
        ):
            bounded[i] = direction
    return bounded


def _clip(
    clipped: Sequence[tuple[Group, list[_Work], list[Tensor], list[Tensor]]], total: Any
) -> None:
    """Scale all directions by ``min(1, √(κ / Σ lr² ⟨d, ∇⟩))`` and take the steps."""
    # The sum is over all processes.
    # of rows that are divided, and others
    products: dict[bool, list[tuple[int, Tensor]]] = {False: [], True: []}
    for group, works, directions, gradients in clipped:
        if directions and group["weight_decay"]:
            torch._foreach_add_(
                directions, [work.own for work in works], alpha=float(group["weight_decay"])
            )
        for work, direction, gradient in zip(works, directions, gradients, strict=True):
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            product = torch.sum(direction * dense) * float(group["lr"]) ** 2
            products[work.own is not work.parameter].append((work.order, product))
    # in the order of the model, so that the sum does not depend on how parameters are grouped
    sums = {
        divided: [p for _, p in sorted(found, key=lambda pair: pair[0])]
        for divided, found in products.items()
    }
    whole, rows = (
        torch.stack([p.to(x[0].device) for p in x]).sum() if x else None for x in sums.values()
    )
    divergence = whole
    if total is not None:
        of_all = total(rows)
        divergence = of_all if whole is None else of_all + whole.to(of_all)
    for group, works, directions, _ in clipped:
        if directions and divergence is not None:
            limit = float(group["kl_clip"]) / divergence.clamp(
                min=torch.finfo(divergence.dtype).tiny
            )
            _step(group, works, directions, limit.sqrt().clamp(max=1.0))
