"""ThorMuon's orthogonalised direction: which matrices a parameter has, and their polar factors.

The formulas are in :class:`torch_thor.ThorMuon`. Its only curvature is A, the second moment of the
input of a layer. A matrix without factors takes the same step with the identity in the place of A.
Each group of a convolution, each expert and each projection of a fused weight is a matrix of its
own; rows that belong to no layer are one where they adjoin.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
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
from torch_thor.distributed.gathered_matrices import ShardedMatrix, orthogonalise_gathered_
from torch_thor.optim.check import fused_on
from torch_thor.optim.model_argument import Group
from torch_thor.optim.plan import Binding, rows_without_layer
from torch_thor.optim.update import subtract_, trust_ratios
from torch_thor.optim.works import (
    Bucket,
    Matrix,
    Rows,
    Work,
    batches_of,
    collecting_buckets,
    dense,
    grouped,
    in_buckets,
    rows_of,
    smallest_norm,
    work_of,
)


@dataclass(eq=False)
class Part(Matrix):
    """A parameter, or a layer's rows of one, as matrices that are orthogonalised."""

    local: Any = None  # the rows of the parameter that this process holds
    full: Any = None  # the geometry of the rows of all processes
    # which process holds which rows, of a matrix that is orthogonalised by one of them
    bounds: tuple[int, ...] | None = None
    # its batch of polar factors, and its matrices in that
    batch: int = 0
    place: Any = None

    def __post_init__(self) -> None:
        size, full = self.geometry, self.full
        self.is_empty = not len(self.of(self.local))
        # whether what `of` returns is a copy, which must be written back
        self.is_scattered = isinstance(self.rows, Tensor)
        self.has_factor = self.left is not None or self.right is not None
        self.shape = min(size.outputs, size.inputs), max(size.outputs, size.inputs)
        # whether the matrices have more rows than columns
        self.is_tall = size.outputs != size.inputs and (
            (size.outputs > size.inputs) != size.transposed
        )
        # The rows that one process holds are orthogonalised and scaled on their own, so that
        # nothing has to be sent; those of all processes together have the norm of the full matrix.
        fraction = size.outputs * size.inputs / max(1, full.outputs * full.inputs)
        self.norm = step_norm(full.outputs, full.inputs)
        self.norm *= math.sqrt(fraction) if self.bounds is None else 1.0
        self.smallest = smallest_norm((size if self.bounds is None else full).outputs)


@dataclass(eq=False)
class MuonWork(Work):
    """Matrices of a group that take their step at once."""

    parts: list[Part] = field(default_factory=list)
    # those whose matrices have one shape, so that they are orthogonalised together
    polars: list[list[Part]] = field(default_factory=list)
    buckets: list[Bucket] = field(
        default_factory=list
    )  # the batches in which they are preconditioned


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


def preconditioned(work: MuonWork, directions: Sequence[Tensor]) -> list[Tensor]:
    """Return ``u (A + λ tr(A)/d_in · I)⁻¹`` of all matrices, or u without a factor.

    Each has its longer side last.
    """
    wide = [
        directions[parts[0].index].new_empty(parts[-1].place.stop, *parts[0].shape)
        for parts in work.polars
    ]
    for batch in in_buckets(work.buckets):
        first, last, inverse = batch.members[0], batch.members[-1], batch.left or batch.right
        if first.is_empty:
            continue
        into = wide[first.batch][first.place.start : last.place.stop]
        into = into.mT if first.is_tall else into
        matrices = [
            part.geometry.to_matrix(part.of(directions[part.index])) for part in batch.members
        ]
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
    wide: Sequence[Tensor],
    lr: float,
    shards: RowShards | None,
    processes: Processes,
    found_inf: Tensor | None,
) -> None:
    """Orthogonalise preconditioned directions, bound them, and take the steps.

    ``shards``: where matrices that processes divide are orthogonalised by one of them.
    """
    ratio = work.group["max_update_ratio"]
    alone = [
        i
        for i, (first, *_) in enumerate(work.polars)
        if first.bounds is None and not first.is_empty
    ]
    limits = None
    if ratio is not None:
        of_parts = iter(_limits([part for i in alone for part in work.polars[i]], lr, float(ratio)))
        limits = [torch.cat([next(of_parts) for _ in work.polars[i]]) for i in alone]
    units = unit_polars_([wide[i] for i in alone], work.group["split_dim"], limits)
    batches = [(work.polars[i], unit) for i, unit in zip(alone, units, strict=True)]
    if not work.on_cpu:
        _subtract_on_device_(work, batches, lr, found_inf)
    else:
        for parts, unit in batches:
            for part in parts:
                _add_(part, unit, part.local, -lr * part.norm)
    gathered = [part for part in work.parts if part.bounds is not None]
    if shards is not None and gathered:
        _step_gathered(work, gathered, wide, lr, shards, processes)


def _subtract_on_device_(
    work: MuonWork, batches: list[tuple[list[Part], Tensor]], lr: float, found_inf: Tensor | None
) -> None:
    """Take the steps with a few kernels for all matrices."""
    steps: dict[int, Tensor] = {}
    for parts, unit in batches:
        if len({part.norm for part in parts}) == 1:
            unit.mul_(parts[0].norm)
        else:
            for part in parts:
                unit[part.place].mul_(part.norm)
        for part in parts:
            weight = work.weights[part.index]
            is_view = part.geometry.is_view and not part.is_tall and weight.is_contiguous()
            if part.rows is None and is_view:
                steps[part.index] = unit[part.place].view(weight.shape)
                continue
            if part.index not in steps:
                steps[part.index] = torch.zeros_like(weight, dtype=unit.dtype)
            _add_(part, unit, steps[part.index], 1.0)
    if steps:
        subtract_([work.weights[i] for i in steps], list(steps.values()), lr, found_inf)


def _add_(part: Part, batch: Tensor, into: Tensor, alpha: float) -> None:
    """Add matrices of a batch to a part's rows of a tensor in the shape of its parameter."""
    rows, unit = part.of(into), batch[part.place]
    matrix = part.geometry.to_matrix(rows)  # a view if the memory layout allows
    matrix.add_(unit.mT if part.is_tall else unit, alpha=alpha)
    part.geometry.from_matrix_(matrix, rows)
    if part.is_scattered:
        into[part.rows] = rows


def _step_gathered(
    work: MuonWork,
    parts: Sequence[Part],
    wide: Sequence[Tensor],
    lr: float,
    shards: RowShards,
    processes: Processes,
) -> None:
    """Take the steps of this process's rows, of matrices that one process orthogonalises."""
    matrices, ratio = [], work.group["max_update_ratio"]
    for part in parts:
        unit = wide[part.batch][part.place]
        rows = unit.new_empty(part.of(part.local).shape)
        if len(rows):
            part.geometry.write_(unit.mT if part.is_tall else unit, rows)
        assert part.bounds is not None
        matrices.append(ShardedMatrix(rows, part.bounds, part.full))
    orthogonalise_gathered_(matrices, shards, work.group["split_dim"], processes)
    if ratio is not None:
        limits = _limits(parts, lr, float(ratio), processes)
        for matrix, limit in zip(matrices, limits, strict=True):
            matrix.local.mul_(limit)
    for part, matrix in zip(parts, matrices, strict=True):
        weight = part.of(part.local)
        weight.add_(matrix.local, alpha=-lr * part.norm)
        if part.is_scattered:
            part.local[part.rows] = weight


def _limits(
    parts: Sequence[Part], lr: float, ratio: float, processes: Processes | None = None
) -> list[Tensor]:
    """Return ``min(1, r · max(‖W‖, 0.03 √d_out) / length of the step)`` of each matrix.

    ``processes``: those that hold rows of the matrices, where one of them orthogonalises each.
    """
    norms = []
    for part in parts:
        # groups lie along the first dimension; a matrix that is gathered has one
        groups = part.geometry.groups if processes is None else 1
        matrices = part.of(part.local).unflatten(0, (groups, -1))
        dtype = torch.float64 if part.local.dtype == torch.float64 else torch.float32
        norms.append(
            torch.linalg.vector_norm(matrices, dim=tuple(range(1, matrices.ndim)), dtype=dtype)
        )
    if not norms:
        return norms
    # one small all-reduce for all matrices: of the squared norms of each process's rows
    if processes is not None:
        squares = torch.cat(norms)
        norms = list(processes.all_reduce(squares.square_(), "shards").sqrt_().to(squares).unbind())
    lengths = [lr * part.norm for part in parts]
    return trust_ratios(
        norms,
        [part.smallest for part in parts],
        [ratio / length if length else math.inf for length in lengths],
    )


# ---- looked up once between refreshes ------------------------------------------------------------


def buckets_of(binding: Binding, group: Group, *, whole_matrices: bool) -> list[Bucket]:
    """Return the works of a group: its matrices, and what AdamW trains."""
    rows = [of for of in rows_of(binding, group) if of.state]
    matrices = [of for of in rows if binding.is_matrix(of.parameter)]
    others = [of for of in rows if not binding.is_matrix(of.parameter) and of.local.numel()]
    if not (whole_matrices or binding.owners):  # else a shard without rows takes part
        matrices = [of for of in matrices if of.local.numel()]
    works: list[Work] = []
    for alike in grouped(matrices, _together):
        work = work_of(MuonWork, group, alike, ("momentum_buffer",), binding)
        for index, of in enumerate(alike):
            work.parts += _parts_of(index, of.parameter, of.local, binding, gathers=whole_matrices)
        _arrange(work, binding)
        works.append(work)
    for alike in grouped(others, _together):
        works.append(work_of(Work, group, alike, ("exp_avg", "exp_avg_sq"), binding))
    return [Bucket(works)]


def _together(rows: Rows) -> Any:
    """Return what parameters must have in common to take their step at once."""
    device = rows.local.device
    kernels = device if device.type == "cpu" else (device, rows.local.dtype)
    return kernels, rows.lr_factor


def _arrange(work: MuonWork, binding: Binding) -> None:
    """Put parts together that are orthogonalised at once, and those that are preconditioned."""
    work.polars = grouped(work.parts, _polars_of)
    key: Callable[[Part], Any] = id
    if not work.on_cpu:
        # what is preconditioned at once follows each other, so that the result is one slice
        key = _shape_of
        work.polars = [
            [part for alike in grouped(parts, key) for part in alike] for parts in work.polars
        ]
    for i, parts in enumerate(work.polars):
        stops = accumulate(part.geometry.groups for part in parts)
        for part, stop in zip(parts, stops, strict=True):
            part.batch, part.place = i, slice(stop - part.geometry.groups, stop)
    parts = [part for alike in work.polars for part in alike]
    for ready, factors in collecting_buckets(work.parameters, binding):
        due = [p for p in parts if p.has_factor and id(work.parameters[p.index]) in ready]
        batches = batches_of(due, key)
        work.buckets.append(Bucket(batches, factors, batches))
    work.buckets.append(Bucket(batches_of([part for part in parts if not part.has_factor], key)))


def _polars_of(part: Part) -> Any:
    """Return what parts must have in common to be orthogonalised together."""
    dtype = torch.float64 if part.local.dtype == torch.float64 else torch.float32
    return part.shape, dtype, part.local.device, part.bounds is None, part.is_empty


def _shape_of(part: Part) -> Any:
    """Return what parts must have in common to be preconditioned together."""
    factors = [f and (f.layout.local, f.layout.block_sizes) for f in (part.left, part.right)]
    return part.batch, part.geometry, *factors


def matrices_of(parameter: Tensor, binding: Binding) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of each matrix of a parameter that is orthogonalised by itself."""
    if not binding.is_matrix(parameter):
        return ()
    parts = _parts_of(0, parameter, local(parameter), binding)
    return tuple(
        (part.full.outputs, part.full.inputs) for part in parts for _ in range(part.full.groups)
    )


def _parts_of(
    index: int, parameter: Tensor, rows_here: Tensor, binding: Binding, *, gathers: bool = False
) -> Iterator[Part]:
    """Yield the parts of a parameter; ``gathers``: one process takes all rows of a matrix."""
    split = binding.plan.row_splits.get(id(parameter))
    shards = binding.plan.shards_of(parameter) if binding.plan.sharded else None
    for rows, full, factor in _matrices_of(parameter, binding):
        kept = rows if rows is None or shards is None else shards.own_of(rows)
        count = len(parameter) if rows is None else rows.stop - rows.start
        geometry = full.of_rows(count, len(rows_here if kept is None else rows_here[kept]))
        assert geometry is not None  # others were not found to be matrices
        bounds = None
        if gathers and shards is not None and full.groups == 1:
            bounds = bounds_within(shards.bounds[: shards.count + 1], rows)
        left, right = (factor, None) if geometry.transposed else (None, factor)
        part = Part(index, kept, geometry, left, right, local=rows_here, full=full, bounds=bounds)
        yield from [part] if split is None else _projections(part, split, shards)


def _matrices_of(
    parameter: Tensor, binding: Binding
) -> Iterator[tuple[slice | None, Geometry, Factor | None]]:
    """Yield the rows of each matrix of a parameter, its geometry, and its factor."""
    matrix, layer_parameters = (
        binding.plan.matrix_of.get(id(parameter)),
        binding.layer_parameters(parameter),
    )
    if matrix is not None:
        yield None, matrix, None
        return
    taken = [part.view.rows for part in layer_parameters]
    for free in [] if taken[0] is None else rows_without_layer(taken, len(parameter)):
        yield free, Geometry(1, free.stop - free.start, parameter.shape[1:].numel()), None
    for part in layer_parameters:
        factor = part.layer.a if part.layer.refreshes else None
        yield part.view.rows, part.layer.kind.geometry, factor


def _projections(part: Part, split: RowSplit, shards: RowShards | None) -> Iterator[Part]:
    """Yield the projections in a fused weight, of which a process may hold some rows."""
    geometry, full, bounds = part.geometry, part.full, part.bounds
    # the outputs are the second dimension, which processes do not divide
    by_columns = geometry.transposed or geometry.taps > 0
    here = slice(0, full.outputs) if by_columns or shards is None else shards.local
    for size, rows in zip(split.sizes, split.rows(), strict=True):
        rows_here = rows[(rows >= here.start) & (rows < here.stop)] - here.start
        at: Any
        if split.turns > 1:
            at = to_device(rows_here.tolist(), part.local.device, torch.int64)
        else:  # a view
            at = slice(int(rows_here[0]), int(rows_here[-1]) + 1) if len(rows_here) else slice(0)
        if bounds is not None and not by_columns:
            ends = torch.tensor(part.bounds, device="cpu")
            bounds = tuple(torch.searchsorted(rows, ends).tolist())
        yield replace(
            part,
            rows=(slice(None), at) if by_columns else at,
            geometry=geometry.with_outputs(len(rows_here)),
            full=full.with_outputs(size),
            bounds=bounds,
        )


# ---- what is no matrix ---------------------------------------------------------------------------


def adamw_(work: Work, gradients: Sequence[Tensor], lr: float, found_inf: Tensor | None) -> None:
    """Take a step of AdamW without weight decay."""
    alike = all(
        weight.dtype == gradient.dtype
        for weight, gradient in zip(work.weights, gradients, strict=True)
    )
    is_complex = any(weight.is_complex() for weight in work.weights)
    device = work.weights[0].device
    fused = alike and not is_complex and (device.type == "cpu" or fused_on(device))
    if fused and device.type != "cpu":  # fused kernels count on the device
        for state in work.states:
            state["step"] = state["step"].to(device)
    adamw(
        params=work.weights,
        grads=list(gradients),
        exp_avgs=work.moments[0],
        exp_avg_sqs=work.moments[1],
        max_exp_avg_sqs=[],
        state_steps=[state["step"] for state in work.states],
        # torch's batched kernels require parameters and state of one dtype; for bfloat16 parameters
        # state is float32
        foreach=None if alike else False,
        fused=fused or None,
        found_inf=found_inf,
        has_complex=is_complex,
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=lr,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )
