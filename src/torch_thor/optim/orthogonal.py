"""ThorMuon's orthogonalised direction: which matrices a parameter has, and their polar factors.

The formulas are in :class:`torch_thor.ThorMuon`. Its only curvature is A, the second moment of the
input of a layer. A matrix without factors takes the same step with the identity in the place of A.
Each group of a convolution, each expert and each projection of a fused weight is a matrix of its
own; rows that belong to no layer are one where they adjoin.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from torch_thor.curvature.blocks import to_device
from torch_thor.curvature.communication import Processes
from torch_thor.curvature.factor import Factor, local
from torch_thor.curvature.geometry import Geometry
from torch_thor.curvature.polar import unit_polars_
from torch_thor.curvature.row_splits import RowSplit
from torch_thor.curvature.view import RowShards, bounds_within
from torch_thor.distributed.divided import turns_of_parameters
from torch_thor.distributed.gathered_matrices import DividedMatrix, orthogonalise_whole_
from torch_thor.optim.check import fused_on
from torch_thor.optim.model_argument import Group
from torch_thor.optim.plan import Bound, free_rows
from torch_thor.optim.update import subtract_, trust_ratios
from torch_thor.optim.works import (
    Matrix,
    Rows,
    Turn,
    Work,
    batches_of,
    dense,
    grouped,
    in_turns,
    rows_of,
    smallest_norm,
    work_of,
)


@dataclass(eq=False)
class Part(Matrix):
    """A parameter, or a layer's rows of one, as matrices that are orthogonalised."""

    own: Any = None  # the rows of the parameter that this process holds
    whole: Any = None  # the geometry of the rows of all processes
    bounds: tuple[int, ...] | None = None  # which process holds which rows of the matrix
    polars: "Polars" = None  # type: ignore[assignment]  # its batch
    place: Any = None  # and its matrices in that

    def __post_init__(self) -> None:
        own, whole = self.geometry, self.whole
        self.is_empty = not len(self.of(self.own))
        # whether what `of` returns is a copy, which must be written back
        self.is_scattered = isinstance(self.rows, Tensor)
        self.has_factor = self.left is not None or self.right is not None
        self.sides = min(own.outputs, own.inputs), max(own.outputs, own.inputs)
        # whether the matrices have more rows than columns
        self.is_tall = own.outputs != own.inputs and (own.outputs > own.inputs) != own.transposed
        # The rows that one process holds are orthogonalised and scaled on their own, so that
        # nothing has to be sent; those of all processes together have the norm of the whole.
        share = own.outputs * own.inputs / max(1, whole.outputs * whole.inputs)
        self.norm = step_norm(whole.outputs, whole.inputs) * math.sqrt(share)


@dataclass(eq=False)
class Polars:
    """Matrices with the same sides, which are orthogonalised together."""

    parts: list[Part]

    def __post_init__(self) -> None:
        self.count = 0
        for part in self.parts:
            part.polars, part.place = self, slice(self.count, self.count + part.geometry.groups)
            self.count += part.geometry.groups


@dataclass(eq=False)
class MuonWork(Work):
    """Matrices of a group that take their step at once."""

    parts: list[Part] = field(default_factory=list)
    polars: list[Polars] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)  # the batches in which they are preconditioned
    whole: bool = False  # whether matrices that processes divide are orthogonalised as a whole


def step_norm(outputs: int, inputs: int) -> float:
    """Return the Frobenius norm of the step of a matrix at lr 1."""
    return math.sqrt(min(outputs, inputs) * max(1.0, outputs / max(1, inputs)))


def dense_gradients(work: Work) -> list[Tensor]:
    """Return the gradients in the dtype of the moments.

    The moments decay in every row, so sparse updates would save nothing.
    """
    moments = work.moments[0]
    gradients = [dense(g).to(v.dtype) for g, v in zip(work.gradients, moments, strict=True)]
    for i, moment in enumerate(moments):
        # fused kernels need one layout
        if not work.on_cpu and gradients[i].stride() != moment.stride():
            gradients[i] = torch.empty_like(moment).copy_(gradients[i])
    return gradients


def preconditioned(work: MuonWork, directions: Sequence[Tensor]) -> dict[Polars, Tensor]:
    """Return ``u (A + λ tr(A)/d_in · I)⁻¹`` of all matrices, or u without a factor.

    Each has its longer side last.
    """
    wide = {
        batch: directions[batch.parts[0].index].new_empty(batch.count, *batch.parts[0].sides)
        for batch in work.polars
    }
    for batch in in_turns(work.turns):
        first, last, inverse = batch.members[0], batch.members[-1], batch.left or batch.right
        if first.is_empty:
            continue
        into = wide[first.polars][first.place.start : last.place.stop]
        into = into.mT if first.is_tall else into
        matrices = [one.geometry.to_matrix(one.of(directions[one.index])) for one in batch.members]
        matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        if inverse is None:
            into.copy_(matrix)
        elif batch.left is not None:
            into.copy_(inverse.left_multiply(matrix.to(into.dtype)))
        else:
            inverse.write_right_product_(matrix.to(into.dtype), 1.0, into)
    return wide


def subtract_orthogonal_(
    work: MuonWork,
    wide: Mapping[Polars, Tensor],
    lr: float,
    shards: RowShards | None,
    processes: Processes,
    unless: Tensor | None,
) -> None:
    """Orthogonalise preconditioned directions, bound them, and take the steps.

    ``shards``: where matrices that processes divide are orthogonalised as a whole.
    """
    ratio, rows = work.group["max_update_ratio"], work.group["split_dim"]
    batches = {
        batch: matrices
        for batch, matrices in wide.items()
        if (shards is None or batch.parts[0].bounds is None) and not batch.parts[0].is_empty
    }
    limits = None
    if ratio is not None:
        found = iter(_shares([part for batch in batches for part in batch.parts], lr, float(ratio)))
        limits = [torch.cat([next(found) for _ in batch.parts]) for batch in batches]
    units = dict(zip(batches, unit_polars_(list(batches.values()), rows, limits), strict=True))
    if work.on_cpu:
        for part in work.parts:
            if part.polars in units:
                unit = units[part.polars][part.place]
                weight = part.of(part.own)
                # a view of the weight if its memory layout allows
                matrix = part.geometry.to_matrix(weight)
                matrix.add_(unit.mT if part.is_tall else unit, alpha=-lr * part.norm)
                part.geometry.from_matrix_(matrix, weight)
                if part.is_scattered:
                    part.own[part.rows] = weight
    else:
        _subtract_on_device_(work, units, lr, unless)
    if shards is not None:
        _step_whole(work, wide, lr, rows, shards, processes, ratio)


def _subtract_on_device_(
    work: MuonWork, units: Mapping[Polars, Tensor], lr: float, unless: Tensor | None
) -> None:
    """Take the steps with a few kernels for all matrices."""
    steps: list[Any] = [None] * len(work.weights)
    for batch, unit in units.items():
        if len({part.norm for part in batch.parts}) == 1:
            unit.mul_(batch.parts[0].norm)
        else:
            for part in batch.parts:
                unit[part.place].mul_(part.norm)
    for part in work.parts:
        if part.polars not in units:
            continue
        own, weight = units[part.polars][part.place], work.weights[part.index]
        is_view = part.geometry.is_view and not part.is_tall and weight.is_contiguous()
        if part.rows is None and is_view:
            steps[part.index] = own.view(weight.shape)
            continue
        if steps[part.index] is None:
            steps[part.index] = torch.zeros_like(weight, dtype=own.dtype)
        target = part.of(steps[part.index])
        part.geometry.write_(own.mT if part.is_tall else own, target)
        if part.is_scattered:
            steps[part.index][part.rows] = target
    moved = [
        (weight, step) for weight, step in zip(work.weights, steps, strict=True) if step is not None
    ]
    if moved:
        subtract_([weight for weight, _ in moved], [step for _, step in moved], lr, unless)


def _step_whole(
    work: MuonWork,
    wide: Mapping[Polars, Tensor],
    lr: float,
    rows: int | None,
    shards: RowShards,
    processes: Processes,
    ratio: float | None,
) -> None:
    """Take the steps of this process's rows, of matrices that are orthogonalised as a whole."""
    parts, matrices = [part for part in work.parts if part.bounds is not None], []
    for part in parts:
        own = wide[part.polars][part.place]
        of_rows = torch.empty(part.of(part.own).shape, dtype=own.dtype, device=own.device)
        if len(of_rows):
            part.geometry.write_(own.mT if part.is_tall else own, of_rows)
        assert part.bounds is not None
        matrices.append(DividedMatrix(of_rows, part.bounds, part.whole))
    if not matrices:
        return
    orthogonalise_whole_(matrices, shards, rows, processes)
    if ratio is not None:
        for one, limit in zip(matrices, _shares(parts, lr, ratio, processes), strict=True):
            one.own.mul_(limit)
    for part, one in zip(parts, matrices, strict=True):
        weight = part.of(part.own)
        weight.add_(one.own, alpha=-lr * step_norm(part.whole.outputs, part.whole.inputs))
        if part.is_scattered:
            part.own[part.rows] = weight


def _shares(
    parts: Sequence[Part], lr: float, ratio: float, processes: Processes | None = None
) -> list[Tensor]:
    """Return ``min(1, r · max(‖W‖, 0.03 √d_out) / length of the step)`` of each matrix.

    ``processes``: for matrices that are orthogonalised as a whole.
    """
    norms, geometries, lengths = [], [], []
    for part in parts:
        is_gathered = processes is not None
        geometry, groups = (part.whole, 1) if is_gathered else (part.geometry, part.geometry.groups)
        # groups lie along the first dimension
        matrices = part.of(part.own).unflatten(0, (groups, -1))
        dtype = torch.float64 if part.own.dtype == torch.float64 else torch.float32
        norms.append(
            torch.linalg.vector_norm(matrices, dim=tuple(range(1, matrices.ndim)), dtype=dtype)
        )
        geometries.append(geometry)
        norm = step_norm(geometry.outputs, geometry.inputs) if is_gathered else part.norm
        lengths.append(lr * norm)
    if not norms:
        return norms
    # one small all-reduce for all matrices: of the squared norms of each process's rows
    if processes is not None:
        squares = torch.cat(norms)
        norms = list(processes.all_reduce(squares.square_(), "shards").sqrt_().to(squares).unbind())
    smallest = [smallest_norm(geometry.outputs) for geometry in geometries]
    return trust_ratios(
        norms, smallest, [ratio / length if length else math.inf for length in lengths]
    )


# ---- looked up once between refreshes ------------------------------------------------------------


def turns_of(bound: Bound, group: Group, *, whole_matrices: bool) -> list[Turn]:
    """Return the works of a group: its matrices, and what AdamW trains."""
    rows = [of for of in rows_of(bound, group) if of.state]
    matrices = [of for of in rows if bound.is_matrix(of.parameter)]
    others = [of for of in rows if not bound.is_matrix(of.parameter) and of.own.numel()]
    if not (whole_matrices or bound.owners):  # else a shard without rows takes part
        matrices = [of for of in matrices if of.own.numel()]
    works: list[Work] = []
    for alike in grouped(matrices, _together):
        work = work_of(MuonWork, group, alike, ("momentum_buffer",), bound)
        work.whole = whole_matrices
        for index, of in enumerate(alike):
            work.parts += _parts_of(index, of.parameter, of.own, bound)
        _arrange(work)
        work.turns = _turns_of_work(work, bound)
        works.append(work)
    for alike in grouped(others, _together):
        works.append(work_of(Work, group, alike, ("exp_avg", "exp_avg_sq"), bound))
    return [Turn(works)]


def _together(rows: Rows) -> Any:
    """Return what parameters must have in common to take their step at once."""
    device = rows.own.device
    kernels = device if device.type == "cpu" else (device, rows.own.dtype)
    return kernels, rows.lr_factor


def _turns_of_work(work: MuonWork, bound: Bound) -> list[Turn]:
    """Return the batches of a work, in the turns in which their inverses are collected."""
    # Batches on a device follow the order of the polars, so that their results are one slice.
    parts = work.parts
    if not work.on_cpu:
        parts = [part for polars in work.polars for part in polars.parts]
    if not bound.owners:
        return [_turn(work, parts, [])]
    turns = []
    for ready, factors in turns_of_parameters(work.parameters, bound):
        members = [part for part in parts if id(work.parameters[part.index]) in ready]
        turns.append(_turn(work, [part for part in members if part.has_factor], factors))
    return [*turns, _turn(work, [part for part in parts if not part.has_factor], [])]


def _arrange(work: MuonWork) -> None:
    """Put parts with the same sides together."""
    # On a device those with factors of one cut are neighbours.

    def key(part: Part) -> Any:
        divided = work.whole and part.bounds is not None
        dtype = torch.float64 if part.own.dtype == torch.float64 else torch.float32
        return part.sides, dtype, part.own.device, divided, part.is_empty

    work.polars = []
    for alike in grouped(work.parts, key):
        if not work.on_cpu:
            alike = [part for own in grouped(alike, _shape_of) for part in own]
        work.polars.append(Polars(alike))


def _shape_of(part: Part) -> Any:
    factors = tuple(f and (f.layout.local, f.layout.cut) for f in (part.left, part.right))
    return part.geometry, part.is_tall, part.sides, factors


def _turn(work: MuonWork, parts: Sequence[Part], factors: list[Factor]) -> Turn:
    key = id if work.on_cpu else lambda part: (id(part.polars), _shape_of(part))
    batches = batches_of(parts, key)
    return Turn(batches, factors, batches)


def matrices_of(parameter: Tensor, bound: Bound) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of each matrix of a parameter that is orthogonalised by itself."""
    is_matrix = bound.is_matrix(parameter)
    wholes = (
        [part.whole for part in _parts_of(0, parameter, local(parameter), bound)]
        if is_matrix
        else []
    )
    return tuple((whole.outputs, whole.inputs) for whole in wholes for _ in range(whole.groups))


def _parts_of(index: int, parameter: Tensor, own: Tensor, bound: Bound) -> Iterator[Part]:
    split = bound.plan.row_splits.get(id(parameter))
    shards = bound.plan.shards_of(parameter) if bound.plan.sharded else None
    for rows, whole, factor in _matrices_of(parameter, bound):
        kept = rows if rows is None or shards is None else shards.own_of(rows)
        count = len(parameter) if rows is None else rows.stop - rows.start
        geometry = whole.of_rows(count, len(own if kept is None else own[kept]))
        assert geometry is not None  # others were not found to be matrices
        bounds = None
        if shards is not None and whole.groups == 1:
            bounds = bounds_within(shards.bounds[: shards.count + 1], rows)
        left, right = (factor, None) if geometry.transposed else (None, factor)
        part = Part(index, kept, geometry, left, right, own=own, whole=whole, bounds=bounds)
        yield from [part] if split is None else _projections(part, split, shards)


def _matrices_of(
    parameter: Tensor, bound: Bound
) -> Iterator[tuple[slice | None, Geometry, Factor | None]]:
    """Yield the rows of each matrix of a parameter, its geometry, and its factor."""
    matrix, shares = bound.plan.matrix_of.get(id(parameter)), bound.shares(parameter)
    if matrix is not None:
        yield None, matrix, None
        return
    taken = [share.view.rows for share in shares]
    for free in [] if taken[0] is None else free_rows(taken, len(parameter)):
        yield free, Geometry(1, free.stop - free.start, parameter.shape[1:].numel()), None
    for share in shares:
        factor = share.layer.a if share.layer.refreshes else None
        yield share.view.rows, share.layer.kind.geometry, factor


def _projections(part: Part, split: RowSplit, shards: RowShards | None) -> Iterator[Part]:
    """Yield the projections in a fused weight, of which a process may hold some rows."""
    geometry, whole = part.geometry, part.whole
    # the outputs are the second dimension, which processes do not divide
    by_columns = geometry.transposed or geometry.taps > 0
    held = slice(0, whole.outputs) if by_columns or shards is None else shards.own
    for size, rows in zip(split.sizes, split.rows(), strict=True):
        own = rows[(rows >= held.start) & (rows < held.stop)] - held.start
        at: Any
        if split.turns > 1:
            at = to_device(own.tolist(), part.own.device, torch.int64)
        else:  # a view
            at = slice(int(own[0]), int(own[-1]) + 1) if len(own) else slice(0, 0)
        bounds = part.bounds
        if bounds is not None and not by_columns:
            bounds = tuple(torch.searchsorted(rows, torch.tensor(bounds)).tolist())
        yield replace(
            part,
            rows=(slice(None), at) if by_columns else at,
            geometry=geometry.with_outputs(len(own)),
            whole=whole.with_outputs(size),
            bounds=bounds,
        )


# ---- what is no matrix ---------------------------------------------------------------------------


def adamw_(work: Work, gradients: Sequence[Tensor], lr: float, unless: Tensor | None) -> None:
    """Take a step of AdamW without weight decay."""
    first, second = work.moments
    alike = all(
        weight.dtype == gradient.dtype
        for weight, gradient in zip(work.weights, gradients, strict=True)
    )
    is_complex = any(weight.is_complex() for weight in work.weights)
    on_cpu = all(weight.device.type == "cpu" for weight in work.weights)
    fused = alike and not is_complex and (on_cpu or fused_on(work.weights[0].device))
    if fused and not on_cpu:  # fused kernels count on the device
        for state, weight in zip(work.states, work.weights, strict=True):
            if state["step"].device != weight.device:
                state["step"] = state["step"].to(weight.device)
    adamw(
        params=work.weights,
        grads=list(gradients),
        exp_avgs=first,
        exp_avg_sqs=second,
        max_exp_avg_sqs=[],
        state_steps=[state["step"] for state in work.states],
        # torch's batched kernels require parameters and state of one dtype; for bfloat16 parameters
        # state is float32
        foreach=None if alike else False,
        fused=fused or None,
        found_inf=unless,
        has_complex=is_complex,
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=lr,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )
