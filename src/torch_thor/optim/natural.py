"""A step's natural gradient: a parameter's preconditioned matrices, and products with inverses.

On a CPU the directions of all batches share one memory. On an accelerator those of matrices of one
shape are views of one tensor, the result of a batched product.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks
from torch_thor.optim.batches import (
    Batch,
    Binding,
    Matrix,
    Rows,
    Stack,
    batch_of,
    dense,
    grouped,
    rows_of,
    with_gradients,
)
from torch_thor.optim.model_argument import Group


def natural_gradients(batches: Iterable[Batch]) -> Iterator[tuple[Batch, list[Tensor]]]:
    """Yield the natural gradients of the parameters of each batch.

    They are ``(1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹``; ∇W without factors.
    """
    memory: dict[Any, Tensor] = {}
    for batch in with_gradients(batches):
        yield batch, _natural_gradient(batch, memory)


def _natural_gradient(batch: Batch, memory: dict[Any, Tensor]) -> list[Tensor]:
    """Return the natural gradient of each parameter, and ∇W of rows without factors."""
    if not batch.stacks:
        copy = bool(batch.group.get("weight_decay"))  # it is added in place
        return [dense(gradient).to(batch.dtype, copy=copy) for gradient in batch.gradients]
    directions = _new_directions(batch, memory)
    for rows in batch.plain:
        gradient = rows.of(dense(batch.gradients[rows.index]))
        rows.of(directions[rows.index]).zero_().add_(gradient)
    for stack in batch.stacks:
        _solve(stack, batch.gradients, directions)
    return directions


def _new_directions(batch: Batch, memory: dict[Any, Tensor]) -> list[Any]:
    """Return memory for the directions; where a stack makes it, the shape that is needed.

    ``memory`` is shared by parameters that take their steps one by one: each new allocation costs
    page faults.
    """
    if batch.is_single:
        weight, like = batch.weights[0], batch.moments[0][0]
        buffer = memory.get(batch.dtype)
        if buffer is None or buffer.numel() < weight.numel():
            buffer = torch.empty(weight.numel(), dtype=batch.dtype, device="cpu")
            memory[batch.dtype] = buffer
        return [buffer[: weight.numel()].as_strided(weight.shape, like.stride())]
    directions: list[Any] = [None] * len(batch.weights)
    for stack in batch.stacks:
        for matrix in stack.members if len(stack.members) > 1 else ():
            weight, is_bias = batch.weights[matrix.index], matrix.right is None
            is_view = weight.is_contiguous() and (is_bias or matrix.geometry.is_view)
            if matrix.rows is None and is_view:
                directions[matrix.index] = weight.shape
    return [
        torch.empty_like(weight, dtype=batch.dtype) if shape is None else shape
        for weight, shape in zip(batch.weights, directions, strict=True)
    ]


def _solve(stack: Stack, gradients: Sequence[Tensor], into: list[Any]) -> None:
    """Write ``d = (1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹`` of each member."""
    left, right, first = stack.left, stack.right, stack.members[0]
    assert left is not None
    sources = [matrix.of(gradients[matrix.index]) for matrix in stack.members]
    if len(sources) == 1:
        _solve_one(first, left, right, sources[0], first.of(into[first.index]))
        return
    if right is None:  # a bias has the constant input 1, so its A is 1
        groups = left.block_sizes.groups // len(sources)
        columns = torch.cat([source.reshape(groups, -1, 1) for source in sources])
        solved = left.left_multiply(columns.to(left.rows.dtype))
    else:
        stacked = torch.cat([first.geometry.to_matrix(source) for source in sources])
        before = left.left_multiply(stacked.to(left.rows.dtype))
        solved = torch.empty_like(before)
        right.write_right_product_(before, 1.0, solved)
    _put(stack, solved, into)


def _put(stack: Stack, result: Tensor, into: list[Any]) -> None:
    """Store the results of all members, ``(n · groups, …)``; as views where there is no memory."""
    if not any(isinstance(into[matrix.index], Tensor) for matrix in stack.members):
        stack.result = result.view(len(stack.members), -1)
    for matrix, solved in zip(stack.members, result.chunk(len(stack.members)), strict=True):
        if not isinstance(into[matrix.index], Tensor):
            into[matrix.index] = solved.view(into[matrix.index])  # the shape of the parameter
            continue
        target = matrix.of(into[matrix.index])
        if matrix.right is None or solved.shape[-1] == 1:
            target.copy_(solved.reshape(target.shape))
        else:
            matrix.geometry.write_(solved, target)


def _solve_one(
    matrix: Matrix, left: Blocks, right: Blocks | None, gradient: Tensor, into: Tensor
) -> None:
    """Write ``d = (1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹`` of one matrix."""
    geometry = matrix.geometry
    gradient = dense(gradient)
    if right is not None:
        solved = left.left_multiply(geometry.to_matrix(gradient).to(left.rows.dtype))
        target = geometry.to_matrix(into)
        right.write_right_product_(solved, matrix.scale, target)
        geometry.from_matrix_(target, into)
        return
    # a bias has the constant input 1, so its A is 1
    solved = left.left_multiply(
        gradient.to(left.rows.dtype).reshape(left.block_sizes.groups, -1, 1)
    )
    if matrix.scales is not None:
        solved *= matrix.scales
    into.zero_().add_(solved.reshape(into.shape), alpha=matrix.scale)


# ---- made once between refreshes -----------------------------------------------------------------


def batches_of(binding: Binding, group: Group) -> list[Batch]:
    """Return the batches of a group: what is trained plainly, and what is preconditioned."""
    rows = [
        each for each in rows_of(binding, group) if each.local.numel()
    ]  # without shards without rows
    natural = [
        each
        for each in rows
        if any(layer.refreshes for layer, _ in binding.shares_of.get(id(each.parameter), ()))
    ]
    batches = []
    for alike in grouped([each for each in rows if each not in natural], _TOGETHER):
        batches.append(batch_of(group, alike, _momentum(group), binding))
    # one parameter after the other: it and its direction then stay in the cache of a CPU
    one_by_one = group.get("momentum") and not group.get("nesterov") and not group.get("kl_clip")
    for alike in grouped(natural, _TOGETHER):
        is_single = bool(one_by_one) and alike[0].local.device.type == "cpu"
        for part in [[each] for each in alike] if is_single else [alike]:
            batches.append(_natural_batch(group, part, binding, is_single=is_single))
    return batches


# what parameters must have in common to take their step at once
_TOGETHER = attrgetter("local.device", "local.dtype", "lr_factor")


def _momentum(group: Group) -> tuple[str, ...]:
    """Return the keys of the moments."""
    return ("momentum_buffer",) if group.get("momentum") else ()


def _natural_batch(
    group: Group, rows: Sequence[Rows], binding: Binding, *, is_single: bool
) -> Batch:
    batch = batch_of(group, rows, _momentum(group), binding)
    matrices = [m for index, each in enumerate(rows) for m in _matrices_of(index, each, binding)]
    batch.plain = [matrix for matrix in matrices if matrix.geometry is None]
    matrices = [matrix for matrix in matrices if matrix.geometry is not None]
    key = id if batch.on_cpu else partial(_shape_of, batch)
    batch.stacks = [Stack(alike) for alike in grouped(matrices, key)]
    batch.is_single = is_single
    return batch


def _shape_of(batch: Batch, matrix: Matrix) -> Any:
    """Return what matrices of one stack have in common."""
    factors = [factor for factor in (matrix.left, matrix.right) if factor is not None]
    # the gradient of an embedding may be sparse; experts have a T each
    is_diagonal = factors[0].side == "A" and factors[0].layout.block_sizes.is_diagonal
    if is_diagonal or matrix.scales is not None:
        return id(matrix)
    shape = matrix.of(batch.weights[matrix.index]).shape
    cuts = [(factor.layout.local, factor.layout.block_sizes) for factor in factors]
    return matrix.geometry, shape, *cuts


def _matrices_of(index: int, rows: Rows, binding: Binding) -> Iterator[Matrix]:
    """Yield the matrices of a parameter, and without a kind its rows that have no factors."""
    shards = binding.plan.shards.get(id(rows.parameter))
    for taken, layer, view in binding.shares(rows.parameter):
        here = taken if taken is None or shards is None else shards.own_of(taken)
        if here is not None and here.start == here.stop:  # another process holds these rows
            continue
        # a projection of a fused weight may have no factors yet
        if layer is None or not layer.refreshes:
            yield Matrix(index, here)
            continue
        geometry, a, g, scale = layer.geometry, layer.a, layer.g, 1.0 / layer.rows_per_term
        if view is layer.weight_view:
            left, right = (a, g) if geometry.transposed else (g, a)
            yield Matrix(index, here, geometry, left, right, scale)
            continue
        scales = None
        # 1 / T of each expert, of which its G contains one √T, and the A of a bias none
        if layer.kind.has_own_rows:
            rows_per_term = layer.state[layer.prefix + "group_rows_per_term"]
            scales = torch.where(rows_per_term > 0, rows_per_term, 1.0).rsqrt()[:, None, None]
        yield Matrix(index, here, geometry, g, None, scale, scales)
