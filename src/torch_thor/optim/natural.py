"""A step's natural gradient: a parameter's preconditioned matrices, and products with inverses.

On a CPU the directions of all works share one memory. On an accelerator those of matrices of one
shape are views of one tensor, the result of a batched product.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks, factor_dtype, ieee_float32
from torch_thor.curvature.factor import Factor, local
from torch_thor.curvature.kinds import MatrixWeight
from torch_thor.distributed.divided import is_divided, turns_of_group
from torch_thor.optim.parameters import Group
from torch_thor.optim.plan import Bound, free_rows
from torch_thor.optim.works import Batch, Matrix, Turn, Work, grouped, here, work_of


def natural_gradients(works: Iterable[Work]) -> Iterator[tuple[Work, list[Tensor]]]:
    """Yield the natural gradients of the parameters of each work that have a gradient.

    They are ``(1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹``.
    """
    memory: dict[Any, Tensor] = {}
    for prepared in works:
        work = prepared.with_gradients()
        if work is not None:
            yield work, _natural_gradient(work, memory)


def _new_directions(work: Work, memory: dict[Any, Tensor]) -> list[Any]:
    """Return memory for the directions; where a batch makes it, the shape that is needed.

    ``memory`` is shared by parameters that take their steps one by one: each new allocation costs
    page faults.
    """
    if work.layout is not None:
        size, shape, strides = work.layout
        found = memory.get(work.dtype)
        if found is None or found.numel() < size:
            found = memory[work.dtype] = torch.empty(size, dtype=work.dtype)
        return [found[:size].as_strided(shape, strides)]
    weights, dtype = work.weights, work.dtype
    made: list[Any] = [None] * len(weights)
    for batch in work.batches:
        if len(batch.members) > 1:
            for one in batch.members:
                weight = weights[one.index]
                plain = type(one.kind).to_matrix is MatrixWeight.to_matrix and not one.kind.taps
                if one.rows is None and weight.is_contiguous() and (plain or one.right is None):
                    made[one.index] = weight.shape
    return [
        torch.empty_like(w, dtype=dtype) if one is None else one
        for w, one in zip(weights, made, strict=True)
    ]


def _natural_gradient(work: Work, memory: dict[Any, Tensor]) -> list[Tensor]:
    """Return the natural gradient of each parameter, and ∇W of rows without factors."""
    # The natural gradient is ``(1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹``.
    if not work.is_natural:
        copy = bool(work.group["weight_decay"])  # it is added in place
        return [
            (g.to_dense() if g.is_sparse else g).to(work.dtype, copy=copy) for g in work.gradients
        ]
    directions = _new_directions(work, memory)
    for rows in work.plain:
        gradient = work.gradients[rows.index]
        rows.of(directions[rows.index]).zero_().add_(
            rows.of(gradient.to_dense() if gradient.is_sparse else gradient)
        )
    for batch in work.batches:
        _solve(batch, work.gradients, directions)
    return directions


def _solve(batch: Batch, gradients: Sequence[Tensor], into: list[Any]) -> None:
    """Write ``d = (1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹`` of each member (THOR)."""
    left, right = batch.left, batch.right
    assert left is not None
    if len(batch.members) == 1:
        one = batch.members[0]
        source, target, rows = gradients[one.index], into[one.index], one.rows
        source, target = (source, target) if rows is None else (source[rows], target[rows])
        _solve_one(one, left, right, source, target)
        return
    sources = [one.of(gradients[one.index]) for one in batch.members]
    first, dtype = batch.members[0], left.rows.dtype
    with ieee_float32(left.rows.device.type):
        if right is None:  # a bias has the constant input 1, so its A is 1
            groups = left.cut.groups // len(sources)
            columns = torch.cat([source.to(dtype).reshape(groups, -1, 1) for source in sources])
            solved = left.left_multiply(columns)
        else:
            before = left.left_multiply(
                torch.cat([first.kind.to_matrix(source).to(dtype) for source in sources])
            )
            solved = torch.empty_like(before)
            right.accumulate_right_product_(before, 1.0, solved, 0.0)
    _put(batch, solved, into)


def _put(batch: Batch, result: Tensor, into: list[Any]) -> None:
    """Store the results of all members, ``(n · groups, …)``."""
    # Where there is no memory for one, it is stored as a view.
    if not any(isinstance(into[one.index], Tensor) for one in batch.members):
        batch.result = result.view(len(batch.members), -1)
    for one, own in zip(batch.members, result.chunk(len(batch.members)), strict=True):
        if not isinstance(into[one.index], Tensor):
            into[one.index] = own.view(into[one.index])  # the shape of the parameter
            continue
        target = one.of(into[one.index])
        if one.right is None or own.shape[-1] == 1:
            target.copy_(own.reshape(target.shape))
        else:
            matrix = one.kind.to_matrix(target)
            matrix.copy_(own)
            one.kind.from_matrix_(matrix, target)


def _solve_one(
    matrix: Matrix, left: Blocks, right: Blocks | None, gradient: Tensor, into: Tensor
) -> None:
    """Write ``d = (1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹`` of one matrix."""
    kind = matrix.kind
    if gradient.is_sparse:
        if gradient.sparse_dim() == 1 and kind.diagonal_input and right is not None:
            _solve_rows(left, right, gradient.coalesce(), matrix.scale, into)
            return
        gradient = gradient.to_dense()
    with ieee_float32(gradient.device.type):
        if right is not None:
            solved = left.left_multiply(kind.to_matrix(gradient).to(left.rows.dtype))
            target = kind.to_matrix(into)
            right.accumulate_right_product_(solved, matrix.scale, target, 0.0)
            kind.from_matrix_(target, into)
            return
        # a bias has the constant input 1, so its A is 1
        solved = left.left_multiply(gradient.to(left.rows.dtype).reshape(left.cut.groups, -1, 1))
    if matrix.scales is not None:
        solved *= matrix.scales
    into.zero_().add_(solved.reshape(into.shape), alpha=matrix.scale)


def _solve_rows(a: Blocks, g: Blocks, gradient: Tensor, scale: float, into: Tensor) -> None:
    """Solve for the sparse gradient of an embedding, which changes the rows of its tokens only."""
    tokens, rows = gradient.indices()[0], gradient.values().to(a.rows.dtype)
    scaled = rows * a.rows[tokens]
    solved = torch.zeros_like(scaled)
    with ieee_float32(gradient.device.type):
        g.accumulate_right_product_(scaled[None], scale, solved[None], 0.0)
    into.zero_().index_add_(0, tokens, solved)


# ---- looked up once between refreshes ------------------------------------------------------------


@dataclass(eq=False)
class _Rows:
    """A parameter, the rows of it that this process holds, and their preconditioned matrices."""

    parameter: nn.Parameter
    own: Tensor
    state: dict[str, Any]
    matrices: list[Matrix]
    plain: list[Matrix]


def turns_of(bound: Bound, group: Group) -> list[Turn]:
    """Return the works of a group, in the turns in which their inverses are collected."""
    found = []
    for parameter in group["params"]:
        own = local(parameter) if bound.plan.sharded else parameter
        if own.numel():  # else a shard without rows
            found.append(
                _Rows(
                    parameter,
                    own,
                    bound.states.get(parameter, {}),
                    *_matrices_of(parameter, own, bound),
                )
            )
    natural = [one for one in found if one.matrices or one.plain]
    others = [one for one in found if not (one.matrices or one.plain)]
    divided = is_divided(bound.plan.layers.values())
    turns = [Turn([_work_of(group, alike, bound) for alike in grouped(others, _kernels_of)])]
    # one parameter after the other: it and its direction then stay in the cache of a CPU
    one_by_one = group["momentum"] and not group["nesterov"] and group["kl_clip"] is None
    everything = frozenset(id(one.parameter) for one in natural), list[Factor]()
    for ready, factors in turns_of_group(group, bound) if divided else [everything]:
        works = []
        for alike in grouped((one for one in natural if id(one.parameter) in ready), _kernels_of):
            if one_by_one and alike[0].own.device.type == "cpu":
                works += [_work_of(group, [one], bound, alone=True) for one in alike]
            else:
                works.append(_work_of(group, alike, bound))
        turns.append(Turn(works, factors, [batch for work in works for batch in work.batches]))
    return turns


def _kernels_of(rows: _Rows) -> Any:
    """Return what parameters must have in common to share kernels."""
    return rows.own.device, rows.own.dtype


def _work_of(group: Group, rows: Sequence[_Rows], bound: Bound, *, alone: bool = False) -> Work:
    if group["momentum"]:
        for one in rows:  # a parameter whose gradient was set by hand has no state
            if "momentum_buffer" not in one.state:
                one.state["momentum_buffer"] = torch.zeros_like(
                    one.parameter, dtype=factor_dtype(one.own.dtype)
                )
    keys = ("momentum_buffer",) if group["momentum"] else ()
    work = work_of(group, [(one.parameter, one.own, one.state) for one in rows], keys, bound)
    for index, one in enumerate(rows):
        for matrix in (*one.matrices, *one.plain):
            matrix.index = index
    matrices, several = [m for one in rows for m in one.matrices], rows[0].own.device.type != "cpu"
    work.batches = [
        Batch(alike)
        for alike in grouped(matrices, lambda m: _shape_of(m, rows) if several else id(m))
    ]
    work.plain = [m for one in rows for m in one.plain]
    work.is_natural = bool(work.batches or work.plain)
    if alone:
        work.layout = work.weights[0].numel(), work.weights[0].shape, work.moments[0][0].stride()
    inverses = here(work.batches)
    for batch in work.batches:
        batch.bind(inverses)
    return work


def _shape_of(matrix: Matrix, rows: Sequence[_Rows]) -> Any:
    """Return what matrices of one batch have in common."""
    kind, own = matrix.kind, matrix.of(rows[matrix.index].own)
    # whose gradient may be sparse; experts have a T each
    if kind.diagonal_input or matrix.scales is not None:
        return id(matrix)
    return (
        type(kind),
        kind.taps,
        kind.transposed,
        own.shape,
        *(f and (f.held, f.cut) for f in (matrix.left, matrix.right)),
    )


def _matrices_of(
    parameter: nn.Parameter, own: Tensor, bound: Bound
) -> tuple[list[Matrix], list[Matrix]]:
    """Return the preconditioned matrices of a parameter, and its other rows, if there are any."""
    matrices: list[Matrix] = []
    plain: list[Matrix] = []
    shares = bound.shares(parameter)
    if not any(share.layer.refreshes for share in shares):
        return [], []
    if shares[0].view.local_rows is not None:
        plain += [
            Matrix(0, rows)
            for rows in free_rows([share.view.local_rows for share in shares], len(own))
        ]
    for share in shares:
        layer, rows, kind = share.layer, share.view.local_rows, share.layer.geometry
        if rows is not None and rows.start == rows.stop:  # another process holds these rows
            continue
        if not layer.refreshes:  # one projection of a fused weight may have no factors yet
            plain.append(Matrix(0, rows))
            continue
        (a, g), scales = layer.stored, None
        # 1 / T of each expert, of which its G contains one √T, and the A of a bias none
        if kind.routed:
            terms = layer.state[layer.prefix + "group_rows_per_term"]
            scales = torch.where(terms > 0, terms, 1.0).rsqrt()[:, None, None]
        left, right = (a, g) if kind.transposed else (g, a)
        if not share.is_weight:
            matrices.append(Matrix(0, rows, kind, g, None, 1.0 / layer.rows_per_term, scales))
        else:
            matrices.append(Matrix(0, rows, kind, left, right, 1.0 / layer.rows_per_term))
    return matrices, plain
