"""A step's natural gradient: a parameter's preconditioned matrices, and products with inverses.

On a CPU the directions of all works share one memory. On an accelerator those of matrices of one
shape are views of one tensor, the result of a batched product.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks, factor_dtype
from torch_thor.optim.model_argument import Group
from torch_thor.optim.plan import Binding, rows_without_layer
from torch_thor.optim.works import (
    Batch,
    Bucket,
    Matrix,
    Rows,
    Work,
    batches_of,
    collecting_buckets,
    dense,
    grouped,
    rows_of,
    with_gradients,
    work_of,
)


def natural_gradients(works: Iterable[Work]) -> Iterator[tuple[Work, list[Tensor]]]:
    """Yield the natural gradients of the parameters of each work that have a gradient.

    They are ``(1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹``.
    """
    memory: dict[Any, Tensor] = {}
    for work in with_gradients(works):
        yield work, _natural_gradient(work, memory)


def _new_directions(work: Work, memory: dict[Any, Tensor]) -> list[Any]:
    """Return memory for the directions; where a batch makes it, the shape that is needed.

    ``memory`` is shared by parameters that take their steps one by one: each new allocation costs
    page faults.
    """
    if work.layout is not None:
        size, shape, strides = work.layout
        buffer = memory.get(work.dtype)
        if buffer is None or buffer.numel() < size:
            buffer = memory[work.dtype] = torch.empty(size, dtype=work.dtype, device="cpu")
        return [buffer[:size].as_strided(shape, strides)]
    directions: list[Any] = [None] * len(work.weights)
    for batch in work.batches:
        for matrix in batch.members if len(batch.members) > 1 else ():
            weight, is_bias = work.weights[matrix.index], matrix.right is None
            is_view = weight.is_contiguous() and (is_bias or matrix.geometry.is_view)
            if matrix.rows is None and is_view:
                directions[matrix.index] = weight.shape
    return [
        torch.empty_like(weight, dtype=work.dtype) if shape is None else shape
        for weight, shape in zip(work.weights, directions, strict=True)
    ]


def _natural_gradient(work: Work, memory: dict[Any, Tensor]) -> list[Tensor]:
    """Return the natural gradient of each parameter, and ∇W of rows without factors."""
    if not work.is_natural:
        copy = bool(work.group["weight_decay"])  # it is added in place
        return [dense(gradient).to(work.dtype, copy=copy) for gradient in work.gradients]
    directions = _new_directions(work, memory)
    for rows in work.plain:
        gradient = rows.of(dense(work.gradients[rows.index]))
        rows.of(directions[rows.index]).zero_().add_(gradient)
    for batch in work.batches:
        _solve(batch, work.gradients, directions)
    return directions


def _solve(batch: Batch, gradients: Sequence[Tensor], into: list[Any]) -> None:
    """Write ``d = (1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹`` of each member (THOR)."""
    left, right, first = batch.left, batch.right, batch.members[0]
    assert left is not None
    sources = [matrix.of(gradients[matrix.index]) for matrix in batch.members]
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
    _put(batch, solved, into)


def _put(batch: Batch, result: Tensor, into: list[Any]) -> None:
    """Store the results of all members, ``(n · groups, …)``; as views where there is no memory."""
    if not any(isinstance(into[matrix.index], Tensor) for matrix in batch.members):
        batch.result = result.view(len(batch.members), -1)
    for matrix, solved in zip(batch.members, result.chunk(len(batch.members)), strict=True):
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
    if gradient.is_sparse:
        if gradient.sparse_dim() == 1 and right is not None and left.block_sizes.is_diagonal:
            _solve_rows(left, right, gradient.coalesce(), matrix.scale, into)
            return
        gradient = gradient.to_dense()
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


def _solve_rows(a: Blocks, g: Blocks, gradient: Tensor, scale: float, into: Tensor) -> None:
    """Solve for the sparse gradient of an embedding, which changes the rows of its tokens only."""
    tokens, rows = gradient.indices()[0], gradient.values().to(a.rows.dtype)
    scaled = rows * a.rows[tokens]
    solved = torch.zeros_like(scaled)
    g.write_right_product_(scaled[None], scale, solved[None])
    into.zero_().index_add_(0, tokens, solved)


# ---- looked up once between refreshes ------------------------------------------------------------


def buckets_of(binding: Binding, group: Group) -> list[Bucket]:
    """Return the works of a group, in the buckets in which their inverses are collected."""
    rows = [of for of in rows_of(binding, group) if of.local.numel()]  # without shards without rows
    natural = [
        of for of in rows if any(s.layer.refreshes for s in binding.layer_parameters(of.parameter))
    ]
    plain = grouped([of for of in rows if of not in natural], _KERNELS)
    buckets = [Bucket([_work_of(group, alike, binding) for alike in plain])]
    # one parameter after the other: it and its direction then stay in the cache of a CPU
    one_by_one = group["momentum"] and not group["nesterov"] and group["kl_clip"] is None
    for ready, factors in collecting_buckets(group["params"], binding):
        works = []
        for alike in grouped([of for of in natural if id(of.parameter) in ready], _KERNELS):
            if one_by_one and alike[0].local.device.type == "cpu":
                works += [_natural_work_of(group, [of], binding, alone=True) for of in alike]
            else:
                works.append(_natural_work_of(group, alike, binding))
        buckets.append(Bucket(works, factors, [batch for work in works for batch in work.batches]))
    return buckets


# what parameters must have in common to share kernels
_KERNELS = attrgetter("local.device", "local.dtype")


def _work_of(group: Group, rows: Sequence[Rows], binding: Binding) -> Work:
    keys = ("momentum_buffer",) if group["momentum"] else ()
    for of in rows:  # a parameter whose gradient was set by hand has no state
        for key in keys:
            if key not in of.state:
                of.state[key] = torch.zeros_like(of.parameter, dtype=factor_dtype(of.local.dtype))
    return work_of(Work, group, rows, keys, binding)


def _natural_work_of(
    group: Group, rows: Sequence[Rows], binding: Binding, *, alone: bool = False
) -> Work:
    work = _work_of(group, rows, binding)
    work.is_natural = True
    matrices = [m for index, of in enumerate(rows) for m in _matrices_of(index, of, binding)]
    work.plain = [matrix for matrix in matrices if matrix.geometry is None]
    matrices = [matrix for matrix in matrices if matrix.geometry is not None]
    work.batches = batches_of(matrices, id if work.on_cpu else partial(_shape_of, work))
    if alone:
        work.layout = work.weights[0].numel(), work.weights[0].shape, work.moments[0][0].stride()
    return work


def _shape_of(work: Work, matrix: Matrix) -> Any:
    """Return what matrices of one batch have in common."""
    factors = [factor for factor in (matrix.left, matrix.right) if factor is not None]
    # the gradient of an embedding may be sparse; experts have a T each
    is_diagonal = factors[0].side == "A" and factors[0].layout.block_sizes.is_diagonal
    if is_diagonal or matrix.scales is not None:
        return id(matrix)
    shape = matrix.of(work.weights[matrix.index]).shape
    cuts = [(factor.layout.local, factor.layout.block_sizes) for factor in factors]
    return matrix.geometry, shape, *cuts


def _matrices_of(index: int, rows: Rows, binding: Binding) -> Iterator[Matrix]:
    """Yield the matrices of a parameter, and without a kind its rows that have no factors."""
    layer_parameters = binding.layer_parameters(rows.parameter)
    of_layers = [part.view.local_rows for part in layer_parameters]
    for free in [] if of_layers[0] is None else rows_without_layer(of_layers, len(rows.local)):
        yield Matrix(index, free)
    for part, taken in zip(layer_parameters, of_layers, strict=True):
        layer, geometry = part.layer, part.layer.geometry
        if taken is not None and taken.start == taken.stop:  # another process holds these rows
            continue
        if not layer.refreshes:  # one projection of a fused weight may have no factors yet
            yield Matrix(index, taken)
            continue
        a, g, scale = layer.a, layer.g, 1.0 / layer.rows_per_term
        if part.is_weight:
            left, right = (a, g) if geometry.transposed else (g, a)
            yield Matrix(index, taken, geometry, left, right, scale)
            continue
        scales = None
        # 1 / T of each expert, of which its G contains one √T, and the A of a bias none
        if layer.kind.has_own_rows:
            rows_per_term = layer.state[layer.prefix + "group_rows_per_term"]
            scales = torch.where(rows_per_term > 0, rows_per_term, 1.0).rsqrt()[:, None, None]
        yield Matrix(index, taken, geometry, g, None, scale, scales)
