"""ThorMuon's update: raw-gradient momentum, preconditioned, orthogonalised, scaled to a fixed norm.

The formulas are in :class:`torch_thor.ThorMuon`. Its only curvature is A, the second moment of the
input of a layer. A matrix without factors takes the same step with the identity in the place of A.
Each group of a convolution, each expert and each projection of a fused weight is a matrix of its
own; rows that belong to no layer are one where they adjoin.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from torch_thor.curvature.blocks import ieee_float32
from torch_thor.curvature.factor import Factor, local
from torch_thor.curvature.kinds.base import Kind
from torch_thor.curvature.matrices import PARTS, PlainMatrix
from torch_thor.curvature.polar import unit_polars
from torch_thor.curvature.shards import RowShards, bounds_within
from torch_thor.distributed.divided import collected_turns, is_divided
from torch_thor.distributed.whole import DividedMatrix, orthogonalise_whole_
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.natural import SMALLEST_SHARE
from torch_thor.optim.parameters import Group
from torch_thor.optim.plan import Plan, free_rows

_USUAL_DEPTH = 10  # matrices; the learning rate of networks with more of them is reduced
_ADAMW_SHARE = 0.2  # the learning rate of AdamW as a share of lr


@dataclass
class _Piece:
    """A parameter, or the rows of one that belong to a layer, as a batch of matrices."""

    parameter: Tensor  # the rows of it that this process holds
    rows: Any  # their index in the own rows of the parameter; None for all
    geometry: Kind | PlainMatrix  # converts tensors of this shape into matrices
    whole: Kind | PlainMatrix  # converts the rows of all processes
    factor: Factor | None  # A; None without curvature
    bounds: tuple[int, ...] | None = None  # which process holds which rows of the matrix
    key: int = 0  # the `id` of the parameter
    direction: Any = None  # of this step

    def __post_init__(self) -> None:
        kind, self.transposed = self.geometry, self.geometry.transposed
        self.sides = min(kind.outputs, kind.inputs), max(kind.outputs, kind.inputs)
        # whether the matrices have more rows than columns
        self.is_tall = (
            kind.outputs != kind.inputs and (kind.outputs > kind.inputs) != kind.transposed
        )
        # The rows that one process holds are orthogonalised and scaled on their own, so that
        # nothing has to be sent; those of all processes together have the norm of the whole.
        share = kind.outputs * kind.inputs / max(1, self.whole.outputs * self.whole.inputs)
        self.norm = step_norm(self.whole.outputs, self.whole.inputs) * math.sqrt(share)

    def precondition(self, into: Tensor) -> None:
        """Write ``∇W A_d⁻¹``, or ∇W without a factor, as matrices."""
        matrix = self.geometry.to_matrix(self.direction)
        inverse = None if self.factor is None else self.factor.whole
        if inverse is None:
            into.copy_(matrix)
        elif self.transposed:
            into.copy_(inverse.left_multiply(matrix.to(into.dtype)))
        else:
            inverse.accumulate_right_product_(matrix.to(into.dtype), 1.0, into, 0.0)


@dataclass
class _Work:
    """A trained parameter with all that its steps need until the next refresh."""

    parameter: Tensor
    own: Tensor
    state: dict[str, Any]
    pieces: list[_Piece]  # none where AdamW trains the parameter
    moments: list[Tensor]  # the momentum, or the two of AdamW, of the own rows


def step_norm(outputs: int, inputs: int) -> float:
    """Return the Frobenius norm of the step of a matrix at lr 1."""
    return math.sqrt(min(outputs, inputs) * max(1.0, outputs / max(1, inputs)))


def orthogonal_step(optimizer: CurvatureOptimizer, plan: Plan) -> None:
    """Update every parameter that has a gradient."""
    whole_matrices = optimizer._distributed.whole_matrices
    if plan.program is None:
        plan.program = [
            _prepared(group, plan, optimizer.state, whole_matrices)
            for group in optimizer.param_groups
        ]
    divided = optimizer._distributed.divide_curvature and is_divided(plan.layers.values())
    for group, program in zip(optimizer.param_groups, plan.program, strict=True):
        lr, momentum = float(group["lr"]), float(group["momentum"])
        shrunk: list[Tensor] = []
        matrices: list[_Work] = []
        others: list[tuple[_Work, Tensor]] = []
        gradients: list[Tensor] = []
        buffers: list[Tensor] = []
        for work in program:
            gradient = work.parameter.grad
            if gradient is None:
                continue
            gradient = gradient if work.own is work.parameter else local(gradient)
            # moments decay in every row, so sparse updates would save nothing
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            gradient = gradient.to(work.moments[0].dtype)
            shrunk.append(work.own)
            if work.pieces:
                matrices.append(work)
                gradients.append(gradient)
                buffers.append(work.moments[0])
            else:
                others.append((work, gradient))
        if shrunk and group["weight_decay"]:
            torch._foreach_mul_(shrunk, 1 - lr * float(group["weight_decay"]))
        if matrices:
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, gradients)
            directions = (
                torch._foreach_add(gradients, buffers, alpha=momentum)
                if group["nesterov"]
                else buffers
            )
            pieces: list[_Piece] = []
            for work, direction in zip(matrices, directions, strict=True):
                for piece in work.pieces:
                    piece.direction = direction if piece.rows is None else direction[piece.rows]
                    pieces.append(piece)
            turns = collected_turns(group, plan) if divided else None
            length = lr * math.sqrt(min(1.0, _USUAL_DEPTH / max(1, plan.depth)))
            _step_matrices(
                pieces, group, length, plan.first_shards if whole_matrices else None, turns
            )
        if others:
            _adamw_step(others, lr)


def _step_matrices(
    pieces: list[_Piece], group: Group, lr: float, shards: RowShards | None, turns: Any
) -> None:
    """Precondition and orthogonalise directions, and take the steps."""
    wide: list[Tensor] = []
    for piece in pieces:
        size = piece.geometry.groups, *piece.sides
        wide.append(torch.empty(size, dtype=piece.direction.dtype, device=piece.direction.device))
    for ready in turns or (None,):
        for piece, into in zip(pieces, wide, strict=True):
            if (ready is None or piece.key in ready) and len(piece.parameter):
                with ieee_float32(into.device.type):
                    piece.precondition(into.mT if piece.is_tall else into)
    if turns:  # parameters whose layers have no factors yet are in no turn
        for piece, into in zip(pieces, wide, strict=True):
            if piece.factor is None and len(piece.parameter):
                piece.precondition(into.mT if piece.is_tall else into)
    ratio, rows = group["max_update_ratio"], group["split_dim"]
    alone = [
        i
        for i, piece in enumerate(pieces)
        if (shards is None or piece.bounds is None) and len(piece.parameter)
    ]
    limits: list[Tensor] | None = None
    if ratio is not None:
        limits = _limits([pieces[i] for i in alone], lr, ratio)
    for i, unit in zip(alone, unit_polars([wide[i] for i in alone], rows, limits), strict=True):
        piece = pieces[i]
        # a view of the parameter if its memory layout allows
        matrix = piece.geometry.to_matrix(piece.parameter)
        matrix.add_(unit.mT if piece.is_tall else unit, alpha=-lr * piece.norm)
        piece.geometry.from_matrix_(matrix, piece.parameter)
    if shards is not None:
        members = [
            (piece, own)
            for piece, own in zip(pieces, wide, strict=True)
            if piece.bounds is not None
        ]
        _step_whole(members, lr, rows, shards, ratio)


def _step_whole(
    members: list[tuple[_Piece, Tensor]],
    lr: float,
    rows: int | None,
    shards: RowShards,
    ratio: float | None,
) -> None:
    """Take the steps of this process's rows, of matrices that are orthogonalised as a whole."""
    matrices = []
    pieces = [piece for piece, _ in members]
    for piece, own in members:
        part = torch.empty(piece.parameter.shape, dtype=own.dtype, device=own.device)
        if len(part):
            matrix = piece.geometry.to_matrix(part)
            matrix.copy_(own.mT if piece.is_tall else own)
            piece.geometry.from_matrix_(matrix, part)
        assert piece.bounds is not None
        matrices.append(DividedMatrix(part, piece.bounds, piece.whole))
    if not matrices:
        return
    orthogonalise_whole_(matrices, shards, rows)
    if ratio is not None:
        for one, limit in zip(matrices, _limits(pieces, lr, ratio, shards), strict=True):
            one.own.mul_(limit)
    for piece, one in zip(pieces, matrices, strict=True):
        piece.parameter.add_(
            one.own, alpha=-lr * step_norm(piece.whole.outputs, piece.whole.inputs)
        )


def _limits(
    pieces: list[_Piece], lr: float, ratio: float, shards: RowShards | None = None
) -> list[Tensor]:
    """Return each matrix's factor that bounds its step, without synchronising.

    It is ``min(1, r · max(‖W‖, 0.03 √d_out) / length of the step)``.

    ``shards``: for matrices that are orthogonalised as a whole.
    """
    norms, kinds, lengths = [], [], []
    for piece in pieces:
        kind, groups = (
            (piece.geometry, piece.geometry.groups) if shards is None else (piece.whole, 1)
        )
        # groups lie along the first dimension
        matrices = piece.parameter.unflatten(0, (groups, -1))
        dims = tuple(range(1, matrices.ndim))
        norms.append(torch.linalg.vector_norm(matrices, dim=dims, dtype=piece.direction.dtype))
        kinds.append(kind)
        lengths.append(
            lr * (piece.norm if shards is None else step_norm(kind.outputs, kind.inputs))
        )
    if not norms:
        return norms
    # one small all-reduce for all matrices: of the squared norms of each process's rows
    if shards is not None:
        squares = torch.cat(norms)
        norms = list(shards.total(squares.square_()).sqrt_().to(squares).unbind())
    torch._foreach_maximum_(norms, [SMALLEST_SHARE * math.sqrt(kind.outputs) for kind in kinds])
    torch._foreach_mul_(norms, [ratio / length if length else math.inf for length in lengths])
    torch._foreach_clamp_max_(norms, 1.0)
    return norms


# ---- looked up once between refreshes ------------------------------------------------------------


def _prepared(group: Group, plan: Plan, states: Any, whole_matrices: bool) -> list[_Work]:
    """Look up all that the parameters of a group need."""
    found = []
    for parameter in group["params"]:
        own, key, state = (
            local(parameter) if plan.sharded else parameter,
            id(parameter),
            states.get(parameter),
        )
        is_matrix = key in plan.shares_of or key in plan.matrix_of
        # a shard without rows takes part where matrices are orthogonalised as a whole
        if state and (own.numel() or (is_matrix and whole_matrices)):
            pieces = list(_pieces_of(parameter, own, plan)) if is_matrix else []
            moments = [
                state[name]
                for name in (("momentum_buffer",) if is_matrix else ("exp_avg", "exp_avg_sq"))
            ]
            moments = moments if own is parameter else [local(moment) for moment in moments]
            found.append(_Work(parameter, own, state, pieces, moments))
    return found


def matrices_of(parameter: Tensor, plan: Plan) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of each matrix of a parameter that is orthogonalised by itself."""
    is_matrix = id(parameter) in plan.shares_of or id(parameter) in plan.matrix_of
    wholes = (
        [piece.whole for piece in _pieces_of(parameter, local(parameter), plan)]
        if is_matrix
        else []
    )
    return tuple((whole.outputs, whole.inputs) for whole in wholes for _ in range(whole.groups))


def _pieces_of(parameter: Tensor, own: Tensor, plan: Plan) -> Iterator[_Piece]:
    key, matrix = id(parameter), plan.matrix_of.get(id(parameter))
    shards = plan.shards_of(parameter) if plan.sharded else None
    bounds = None if shards is None else shards.bounds[: shards.count + 1]
    if matrix is not None:
        plain = matrix.of_rows(tuple(parameter.shape), len(own))
        assert plain is not None  # others were not found to be matrices
        yield _Piece(own, None, plain, matrix, None, bounds if matrix.groups == 1 else None, key)
        return
    shares = plan.shares_of[key]
    fused = shares[0].view.rows is not None
    for free in free_rows([share.view.rows for share in shares], len(parameter)) if fused else ():
        kept = free if shards is None else shards.own_of(free)
        whole = PlainMatrix(1, free.stop - free.start, own.shape[1:].numel())
        plain = PlainMatrix(1, len(own[kept]), whole.inputs)
        yield _Piece(
            own[kept],
            kept,
            plain,
            whole,
            None,
            None if bounds is None else bounds_within(bounds, free),
            key,
        )
    for share in shares:
        layer, rows, kind = share.layer, share.view.local_rows, share.layer.kind
        factor = layer.stored[0] if layer.refreshes else None
        if factor is not None:
            # unless steps collect it
            factor.whole = factor.read(inverse=True) if factor.divided is None else None
        its_bounds = None if bounds is None else bounds_within(bounds, share.view.rows)
        sizes = PARTS.get(share.view.module)
        if sizes is None or shards is not None or kind.groups > 1:
            part = own if rows is None else own[rows]
            yield _Piece(part, rows, layer.geometry, kind, factor, its_bounds, key)
            continue
        if sum(sizes) != kind.outputs:
            what = (
                f"split_rows of layer {layer.name!r}: {sizes} must add up to its {kind.outputs} "
                "outputs"
            )
            raise ValueError(f"{what}; correct the sizes")
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        for size, end in zip(sizes, ends, strict=True):
            index = (
                (slice(None), slice(end - size, end)) if kind.transposed else slice(end - size, end)
            )
            plain = PlainMatrix(1, size, kind.inputs, transposed=kind.transposed)
            yield _Piece(own[index], index, plain, plain, factor, None, key)


# ---- what is no matrix ---------------------------------------------------------------------------


def _adamw_step(others: Sequence[tuple[_Work, Tensor]], lr: float) -> None:
    """Take a step of AdamW without weight decay."""
    alike = all(work.own.dtype == gradient.dtype for work, gradient in others)
    is_complex = any(work.own.is_complex() for work, _ in others)
    on_cpu = all(work.own.device.type == "cpu" for work, _ in others)
    adamw(
        params=[work.own for work, _ in others],
        grads=[gradient for _, gradient in others],
        exp_avgs=[work.moments[0] for work, _ in others],
        exp_avg_sqs=[work.moments[1] for work, _ in others],
        max_exp_avg_sqs=[],
        state_steps=[work.state["step"] for work, _ in others],
        # torch's batched kernels require parameters and state of one dtype; for bfloat16 parameters
        # state is float32
        foreach=None if alike else False,
        fused=(alike and on_cpu and not is_complex) or None,
        has_complex=is_complex,
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=lr * _ADAMW_SHARE,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )
