"""The scale-free update rule: momentum on the raw gradient, preconditioned, orthogonalised and scaled to a fixed norm.

For a matrix W (``d_out × d_in``) with momentum ``v ← μ v + ∇W`` (Nesterov: ``u = ∇W + μ v``, else ``u = v``)

    d = orth( u (A + λ tr(A)/d_in I)⁻¹ ),    scaled to ‖d‖_F = √min(d_out, d_in) · √max(1, d_out / d_in)
    W ← (1 − lr · weight_decay) W − lr · √min(1, 10 / L) · d

for L trained matrices (:func:`depth_scale`). The last term is at most ``r · max(‖W‖_F, 0.03 √d_out)`` long
(``max_update_ratio``), of each group of a convolution and each expert on its own.

The step does not depend on the scale of the loss or on the width of the layer, so lr has the same meaning for every
layer and task. A is the second moment of the input of the layer. It is the only curvature that is used, so no
statistics of gradients are needed. ``orth`` returns polar factors of blocks of ``split_dim`` rows
(:mod:`torch_thor.curvature.polar`). A matrix without factors, because THOR has no kind for its layer or has got no
statistics, takes the same step with the identity in the place of A; so do rows of a fused weight that belong to no
layer, each run of neighbouring rows as one matrix. Parameters that are not matrices (biases,
normalisation layers, embeddings) take a step of :class:`torch.optim.AdamW` (:func:`adamw_step_`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.matrices import PlainMatrix
from torch_thor.curvature.polar import orthogonalise
from torch_thor.curvature.precision import ieee_float32
from torch_thor.curvature.shards import RowShards, bounds_within, local
from torch_thor.distributed.divided import DividedInverses
from torch_thor.distributed.whole import DividedMatrix, orthogonalise_whole_
from torch_thor.optim.natural import SMALLEST_SHARE
from torch_thor.optim.parameters import Group, States
from torch_thor.optim.plan import Plan, free_rows

_USUAL_DEPTH = 10  # matrices; the learning rate of networks with more of them is reduced (depth_scale)


@dataclass
class _Piece:
    """A parameter, or the rows of one that belong to a layer, as a batch of matrices."""

    parameter: Tensor  # the parameter, or the rows of it
    direction: Tensor  # the direction to precondition and orthogonalise, in the shape of `parameter`
    geometry: Kind | PlainMatrix  # converts tensors of this shape into matrices
    whole: Kind | PlainMatrix  # converts the rows of all processes
    layer: LayerCurvature | None  # the layer whose factor A preconditions the direction; None if there is no factor
    bounds: tuple[int, ...] | None  # which process holds which rows of the matrix (:class:`DividedMatrix`)
    key: int  # the `id` of the parameter

    @property
    def is_tall(self) -> bool:
        """Whether the matrices that the geometry returns have more rows than columns."""
        kind = self.geometry
        return kind.outputs != kind.inputs and (kind.outputs > kind.inputs) != kind.transposed

    @property
    def shape(self) -> tuple[int, int]:
        """The smaller and the larger side of the matrices."""
        kind = self.geometry
        return min(kind.outputs, kind.inputs), max(kind.outputs, kind.inputs)

    def write(self, into: Tensor) -> None:
        """Write the preconditioned direction as matrices."""
        into = into.mT if self.is_tall else into
        if self.layer is not None:
            _precondition_inputs(self.layer, self.direction, into)
        else:
            into.copy_(self.geometry.to_matrix(self.direction))

    def step_(self, unit: Tensor, lr: float) -> None:
        """Take the step of the parameter."""
        matrix = self.geometry.to_matrix(self.parameter)  # a view of the parameter if its memory layout allows
        matrix.add_(unit.mT if self.is_tall else unit, alpha=-lr * _norm_of_part(self.geometry, self.whole))
        self.geometry.from_matrix_(matrix, self.parameter)


def _precondition_inputs(layer: LayerCurvature, gradient: Tensor, into: Tensor) -> None:
    """Compute ``into ← ∇W A_d⁻¹``, for a layer that has A alone (the scale-free step)."""
    geometry, inverse = layer.geometry, layer.stored[0].inverse()
    matrix = geometry.to_matrix(gradient).to(into.dtype)
    if geometry.transposed:
        into.copy_(inverse.left_multiply(matrix))
    else:
        inverse.accumulate_right_product_(matrix, 1.0, into, 0.0)


def orthogonal_step(
    groups: list[Group], plan: Plan, states: States, inverses: DividedInverses | None, *, whole_matrices: bool
) -> None:
    """Update every parameter that has a gradient."""
    for group in groups:
        lr = float(group["lr"])
        shrunk: list[Tensor] = []
        matrices: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # parameter, gradient, momentum
        others: list[tuple[Tensor, Tensor, dict[str, Any]]] = []  # parameter, gradient, state
        for parameter in group["params"]:
            gradient, key = parameter.grad, id(parameter)
            if gradient is None:
                continue
            own, is_matrix = local(parameter), key in plan.shares_of or key in plan.matrix_of
            if not (own.numel() or (is_matrix and whole_matrices)):  # a shard without rows
                continue
            shrunk.append(own)
            state = states[parameter]
            kept, gradient = local(state["momentum_buffer" if is_matrix else "exp_avg"]), local(gradient)
            if gradient.is_sparse:  # moments decay in every row, so sparse updates would save nothing
                gradient = gradient.to_dense()
            gradient = gradient.to(kept.dtype)
            if is_matrix:
                matrices.append((parameter, gradient, kept))
            else:
                others.append((own, gradient, state))
        if shrunk and group["weight_decay"]:
            torch._foreach_mul_(shrunk, 1 - lr * float(group["weight_decay"]))
        pieces: list[_Piece] = []
        divided: list[_Piece] = []  # rows of matrices that are orthogonalised as a whole
        directions = _directions(matrices, group) if matrices else []
        for (parameter, _, _), direction in zip(matrices, directions, strict=True):
            for piece in _pieces_of(parameter, direction, plan):
                if whole_matrices and piece.bounds is not None:
                    divided.append(piece)
                elif len(piece.parameter):
                    pieces.append(piece)
        if inverses is not None:
            _precondition_in_turns([*pieces, *divided], inverses.turns(group, plan))
        if matrices:
            length, rows, ratio = lr * depth_scale(plan.depth), group["split_dim"], group["max_update_ratio"]
            _step_(pieces, length, rows, ratio)
            if divided and plan.first_shards is not None:
                _step_whole_(divided, length, rows, plan.first_shards, ratio)
        if others:
            adamw_step_(others, lr)


def step_norm(outputs: int, inputs: int) -> float:
    """Return the Frobenius norm of the step of a matrix at lr 1."""
    return math.sqrt(min(outputs, inputs) * max(1.0, outputs / inputs))


def depth_scale(matrices: int) -> float:
    """Return the factor by which the learning rate of a matrix is multiplied in a deep network, ``√min(1, 10 / L)``."""
    return math.sqrt(min(1.0, _USUAL_DEPTH / max(1, matrices)))


def _norms(tensor: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return the Frobenius norms of the matrices of a weight, ``(groups,)``; groups lie along the first dimension."""
    by_group = tensor.unflatten(0, (groups, -1))
    norms: Tensor = torch.linalg.vector_norm(by_group, dim=tuple(range(1, by_group.ndim)), dtype=dtype)
    return norms


def _bounded_(norms: list[Tensor], rows: list[int], lengths: list[float], ratio: float) -> list[Tensor]:
    """Replace norms of matrices by ``min(1, r · max(‖W‖, 0.03 √rows) / length of the step)``, without synchronising."""
    torch._foreach_maximum_(norms, [SMALLEST_SHARE * math.sqrt(count) for count in rows])
    torch._foreach_mul_(norms, [ratio / length if length else math.inf for length in lengths])
    torch._foreach_clamp_max_(norms, 1.0)
    return norms


def _directions(matrices: list[tuple[nn.Parameter, Tensor, Tensor]], group: Group) -> list[Tensor]:
    """Update the momenta, and return the directions u; the gradients are not changed."""
    momentum = float(group["momentum"])
    gradients, buffers = [g for _, g, _ in matrices], [buffer for _, _, buffer in matrices]
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, gradients)
    return list(torch._foreach_add(gradients, buffers, alpha=momentum)) if group["nesterov"] else buffers


def _pieces_of(parameter: nn.Parameter, direction: Tensor, plan: Plan) -> Iterator[_Piece]:
    own, shards, matrix = local(parameter), plan.shards_of(parameter), plan.matrix_of.get(id(parameter))
    bounds = None if shards is None else shards.bounds[: shards.count + 1]
    if matrix is not None:
        plain = matrix.of_rows(tuple(parameter.shape), len(own))
        assert plain is not None  # others were not found to be matrices
        yield _Piece(own, direction, plain, matrix, None, bounds if matrix.groups == 1 else None, id(parameter))
        return
    shares = plan.shares_of[id(parameter)]
    fused = shares[0].view.rows is not None
    for free in free_rows([share.view.rows for share in shares], len(parameter)) if fused else ():
        kept = free if shards is None else shards.own_of(free)
        part, its_direction = own[kept], direction[kept]
        whole = PlainMatrix(1, free.stop - free.start, part.shape[1:].numel())
        plain = PlainMatrix(1, len(part), whole.inputs)
        its_bounds = None if bounds is None else bounds_within(bounds, free)
        yield _Piece(part, its_direction, plain, whole, None, its_bounds, id(parameter))
    for share in shares:
        rows, layer = share.view.local_rows, share.layer if share.layer.refreshes else None
        part, its_direction = (own, direction) if rows is None else (own[rows], direction[rows])
        its_bounds = None if bounds is None else bounds_within(bounds, share.view.rows)
        yield _Piece(part, its_direction, share.layer.geometry, share.layer.kind, layer, its_bounds, id(parameter))


def _norm_of_part(part: Kind | PlainMatrix, whole: Kind | PlainMatrix) -> float:
    """Return the norm of the step of some rows; those of all processes together have the norm of the whole."""
    # The rows that one process holds are orthogonalised and scaled on their own, so that nothing has to be sent.
    share = part.outputs * part.inputs / (whole.outputs * whole.inputs)
    return step_norm(whole.outputs, whole.inputs) * math.sqrt(share)


def _alike(pieces: list[_Piece]) -> Iterable[tuple[tuple[torch.dtype, torch.device], list[_Piece]]]:
    found: defaultdict[tuple[torch.dtype, torch.device], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.direction.dtype, piece.direction.device].append(piece)
    return found.items()


def _precondition_in_turns(pieces: list[_Piece], turns: Iterable[frozenset[int] | None]) -> None:
    """Replace directions by preconditioned ones, layer by layer, as the inverses are collected."""
    for ready in turns:
        for piece in pieces:
            if piece.layer is not None and (ready is None or piece.key in ready):
                piece.direction, piece.layer = _preconditioned(piece), None


def _preconditioned(piece: _Piece) -> Tensor:
    """Return the direction ``∇W A_d⁻¹``, or a copy of ∇W without a factor; in the shape of the parameter."""
    own = torch.empty(piece.parameter.shape, dtype=piece.direction.dtype, device=piece.direction.device)
    if piece.layer is None or not len(own):
        return own.copy_(piece.direction)
    with ieee_float32(own.device.type):
        _precondition_inputs(piece.layer, piece.direction, piece.geometry.to_matrix(own))
    return own


def _step_whole_(pieces: list[_Piece], lr: float, rows: int | None, shards: RowShards, ratio: float | None) -> None:
    """Take the steps of the rows of this process, of matrices that are orthogonalised as a whole."""
    for _, members in _alike(pieces):
        matrices = []
        for piece in members:
            assert piece.bounds is not None
            matrices.append(DividedMatrix(_preconditioned(piece), piece.bounds, piece.whole))
        orthogonalise_whole_(matrices, shards, rows)
        lengths = [lr * step_norm(piece.whole.outputs, piece.whole.inputs) for piece in members]
        if ratio is not None:  # one small all-reduce for all matrices: of the squared norms of each process's rows
            squares = torch.stack(
                [_norms(p.parameter, 1, m.own.dtype)[0] for p, m in zip(members, matrices, strict=True)]
            )
            norms = list(shards.total(squares.square_()).sqrt_().to(squares).unbind())
            scales = _bounded_(norms, [piece.whole.outputs for piece in members], lengths, ratio)
            for matrix, scale in zip(matrices, scales, strict=True):
                matrix.own.mul_(scale)
        for piece, matrix, length in zip(members, matrices, lengths, strict=True):
            piece.parameter.add_(matrix.own, alpha=-length)


def _step_(pieces: list[_Piece], lr: float, rows: int | None, ratio: float | None) -> None:
    """Take the steps of all pieces, in one batch for each shape."""
    for (dtype, device), members in _alike(pieces):
        by_shape: defaultdict[tuple[int, int], list[_Piece]] = defaultdict(list)
        for piece in members:
            by_shape[piece.shape].append(piece)
        with ieee_float32(device.type):
            batches = []
            for shape, shaped in by_shape.items():
                counts = [piece.geometry.groups for piece in shaped]
                batches.append(torch.empty((sum(counts), *shape), dtype=dtype, device=device))
                for piece, own in zip(shaped, batches[-1].split(counts), strict=True):
                    piece.write(own)
            steps = orthogonalise(batches, rows)
        for shaped, step in zip(by_shape.values(), steps, strict=True):
            # clamped for matrices of zeros, whose step is zero
            norms = torch.linalg.matrix_norm(step, keepdim=True).clamp_(min=torch.finfo(dtype).tiny)
            if ratio is not None:
                weights = [_norms(p.parameter, p.geometry.groups, dtype) for p in shaped]
                outputs = [p.geometry.outputs for p in shaped]
                lengths = [lr * _norm_of_part(p.geometry, p.whole) for p in shaped]
                norms /= torch.cat(_bounded_(weights, outputs, lengths, ratio))[:, None, None]
            step.div_(norms)  # in place: a result of orthogonalise() shares no memory with other tensors
            for piece, own in zip(shaped, step.split([p.geometry.groups for p in shaped]), strict=True):
                piece.step_(own, lr)


# The learning rate of AdamW as a share of lr, and its other options.
ADAMW_SHARE = 0.2
ADAMW_BETAS = (0.9, 0.95)
_ADAMW_EPS = 1e-8


def adamw_step_(others: list[tuple[Tensor, Tensor, dict[str, Any]]], lr: float) -> None:
    """Take a step of AdamW with ``ADAMW_SHARE`` of the learning rate, without weight decay."""
    parameters: list[Tensor] = []
    gradients, averages, squares, steps = [], [], [], []
    alike = on_cpu = True
    is_complex = False
    for parameter, gradient, state in others:
        parameters.append(parameter)
        gradients.append(gradient)
        averages.append(local(state["exp_avg"]))
        squares.append(local(state["exp_avg_sq"]))
        steps.append(state["step"])
        alike = alike and parameter.dtype == gradient.dtype
        on_cpu = on_cpu and parameter.device.type == "cpu"
        is_complex = is_complex or parameter.is_complex()
    adamw(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        # torch's batched kernels require parameters and state of one dtype; for bfloat16 parameters state is float32
        foreach=None if alike else False,
        fused=(alike and on_cpu and not is_complex) or None,
        has_complex=is_complex,
        amsgrad=False,
        beta1=ADAMW_BETAS[0],
        beta2=ADAMW_BETAS[1],
        lr=lr * ADAMW_SHARE,
        weight_decay=0.0,
        eps=_ADAMW_EPS,
        maximize=False,
    )
