"""ThorMuon's orthogonalised direction: which matrices a parameter has, and their polar factors.

The formulas are in :class:`torch_thor.ThorMuon`. Its only curvature is A, the second moment of the
input of a layer. A matrix without factors takes the same step with the identity in the place of A.
Each group of a convolution, each expert and each projection of a fused weight is a matrix of its
own; adjoining rows that belong to no layer are one matrix.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from torch_thor.curvature.blocks import to_device
from torch_thor.curvature.communication import Processes
from torch_thor.curvature.geometry import Geometry
from torch_thor.curvature.polar import unit_polars
from torch_thor.curvature.view import RowShards, bounds_within, local
from torch_thor.distributed.gathered_matrices import ShardedMatrix, orthogonalise_gathered_
from torch_thor.optim.averaging import of_last_step
from torch_thor.optim.batches import (
    SMALLEST_SHARE,
    Batch,
    Binding,
    Matrix,
    Rows,
    Stack,
    batch_of,
    dense,
    grouped,
    rows_of,
    subtract_,
    trust_ratios,
)
from torch_thor.optim.model_argument import Group
from torch_thor.optim.projections import RowSplit


@dataclass(eq=False)
class Projection(Matrix):
    """A parameter, or the rows of it that a layer has, as matrices that are orthogonalised."""

    local: Any = None  # the rows of the parameter that this process holds
    full: Any = None  # the geometry of the rows of all processes
    # which process holds which rows, of a matrix that is orthogonalised by one of them
    bounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        size, full = self.geometry, self.full
        self.is_empty = not len(self.of(self.local))
        self.shape = min(size.outputs, size.inputs), max(size.outputs, size.inputs)
        # whether the matrices have more rows than columns
        self.is_tall = size.outputs != size.inputs and (
            (size.outputs > size.inputs) != size.transposed
        )
        # The rows that one process holds are orthogonalised and scaled on their own, so that
        # nothing has to be sent; those of all processes together have the norm of the full matrix.
        fraction = size.outputs * size.inputs / max(1, full.outputs * full.inputs)
        ratio = max(1.0, full.outputs / max(1, full.inputs))
        self.norm = math.sqrt(min(full.outputs, full.inputs) * ratio)  # of the step at lr 1
        self.norm *= math.sqrt(fraction) if self.bounds is None else 1.0
        outputs = (size if self.bounds is None else full).outputs
        self.smallest = SMALLEST_SHARE * math.sqrt(outputs)

    def add_(self, into: Tensor, units: Tensor, alpha: float) -> None:
        """Add matrices, with their longer side last, to the rows of a tensor."""
        rows = self.of(into)
        matrix = self.geometry.to_matrix(rows)  # a view if the memory layout allows
        matrix.add_(units.mT if self.is_tall else units, alpha=alpha)
        self.geometry.from_matrix_(matrix, rows)
        if isinstance(self.rows, Tensor):  # of which `of` returns a copy
            into[self.rows] = rows


def dense_gradients(batch: Batch) -> list[Tensor]:
    """Return the gradients in the dtype of the moments.

    The moments decay in every row, so sparse updates would save nothing.
    """
    pairs = zip(batch.gradients, batch.moments[0], strict=True)
    return [dense(gradient).to(moment.dtype) for gradient, moment in pairs]


def preconditioned(batch: Batch, directions: Sequence[Tensor]) -> list[Tensor]:
    """Return ``u (A + λ tr(A)/d_in · I)⁻¹`` of each stack, or u without a factor.

    The matrices have their longer side last.
    """
    results = []
    for stack in batch.stacks:
        first, inverse = stack.members[0], stack.left or stack.right
        groups = len(stack.members) * first.geometry.groups
        result = directions[first.index].new_empty(groups, *first.shape)
        results.append(result)
        if first.is_empty:
            continue
        into = result.mT if first.is_tall else result
        matrices = [
            part.geometry.to_matrix(part.of(directions[part.index])) for part in stack.members
        ]
        matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        if inverse is None:
            into.copy_(matrix)
        elif stack.left is not None:
            into.copy_(inverse.left_multiply(matrix.to(into.dtype)))
        else:
            inverse.write_right_product_(matrix.to(into.dtype), 1.0, into)
    return results


def subtract_orthogonal_(
    batch: Batch,
    wide: Sequence[Tensor],
    lr: float,
    shards: RowShards | None,
    processes: Processes,
) -> None:
    """Orthogonalise preconditioned directions, bound them, and take the steps.

    ``shards``: where matrices that processes divide are orthogonalised by one of them.
    """
    ratio, split_dim = batch.group["max_update_ratio"], batch.group["split_dim"]
    here = [
        (stack.members, matrices)
        for stack, matrices in zip(batch.stacks, wide, strict=True)
        if stack.members[0].bounds is None and not stack.members[0].is_empty
    ]
    limits = None
    if ratio is not None:
        of_parts = iter(_limits([part for parts, _ in here for part in parts], lr, float(ratio)))
        limits = [torch.cat([next(of_parts) for _ in parts]) for parts, _ in here]
    units = unit_polars([matrices for _, matrices in here], split_dim, limits)
    steps = [
        (part, unit)
        for (parts, _), of_stack in zip(here, units, strict=True)
        for part, unit in zip(parts, of_stack.chunk(len(parts)), strict=True)
    ]
    if batch.on_cpu:
        for part, unit in steps:
            part.add_(part.local, unit, -lr * part.norm)
    else:
        _subtract_on_device_(batch, steps, lr)
    gathered = [
        (part, unit)
        for stack, matrices in zip(batch.stacks, wide, strict=True)
        if stack.members[0].bounds is not None
        for part, unit in zip(stack.members, matrices.chunk(len(stack.members)), strict=True)
    ]
    if shards is not None and gathered:
        _step_gathered(batch, gathered, lr, shards, processes)


def _subtract_on_device_(
    batch: Batch, of_matrices: Sequence[tuple[Projection, Tensor]], lr: float
) -> None:
    """Take the steps with a few kernels for all matrices."""
    torch._foreach_mul_([unit for _, unit in of_matrices], [part.norm for part, _ in of_matrices])
    steps: dict[int, Tensor] = {}
    for part, unit in of_matrices:
        weight = batch.weights[part.index]
        is_view = part.rows is None and part.geometry.is_view and not part.is_tall
        if is_view and weight.is_contiguous():
            steps[part.index] = unit.view(weight.shape)
            continue
        if part.index not in steps:
            steps[part.index] = torch.zeros_like(weight, dtype=unit.dtype)
        part.add_(steps[part.index], unit, 1.0)
    if steps:
        subtract_([batch.weights[i] for i in steps], list(steps.values()), lr)


def _step_gathered(
    batch: Batch,
    of_matrices: Sequence[tuple[Projection, Tensor]],
    lr: float,
    shards: RowShards,
    processes: Processes,
) -> None:
    """Take the steps of this process's rows, of matrices that one process orthogonalises."""
    matrices, ratio = [], batch.group["max_update_ratio"]
    parts = [part for part, _ in of_matrices]
    for part, unit in of_matrices:
        rows = unit.new_empty(part.of(part.local).shape)
        if len(rows):
            part.geometry.write_(unit.mT if part.is_tall else unit, rows)
        assert part.bounds is not None
        matrices.append(ShardedMatrix(rows, part.bounds, part.full))
    orthogonalise_gathered_(matrices, shards, batch.group["split_dim"], processes)
    if ratio is not None:
        limits = _limits(parts, lr, float(ratio), processes)
        for matrix, limit in zip(matrices, limits, strict=True):
            matrix.local.mul_(limit)
    for part, matrix in zip(parts, matrices, strict=True):
        weight = part.of(part.local)
        weight.add_(matrix.local, alpha=-lr * part.norm)
        if isinstance(part.rows, Tensor):
            part.local[part.rows] = weight


def _limits(
    parts: Sequence[Projection], lr: float, ratio: float, processes: Processes | None = None
) -> list[Tensor]:
    """Return ``min(1, r · max(‖W‖, 0.03 √d_out) / length of the step)`` of each matrix.

    ``processes``: those that hold rows of the matrices, where one of them orthogonalises each.
    """
    norms = []
    for part in parts:
        # groups lie along the first dimension; a matrix that is gathered has one group
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


# ---- made once between refreshes -----------------------------------------------------------------


def batches_of(
    binding: Binding, group: Group, *, whole_matrices: bool, anytime: bool
) -> list[Batch]:
    """Return the batches of a group: its matrices, and what AdamW trains."""
    rows = [each for each in rows_of(binding, group) if each.state]
    if anytime:
        rows = [of_last_step(each) for each in rows]
    matrices = [each for each in rows if binding.is_matrix(each.parameter)]
    others = [each for each in rows if not binding.is_matrix(each.parameter) and each.local.numel()]
    if not whole_matrices:  # else a shard without rows takes part
        matrices = [each for each in matrices if each.local.numel()]
    batches = []
    for alike in grouped(matrices, _together):
        batch = batch_of(group, alike, ("momentum_buffer",), binding)
        parts = [
            part
            for index, each in enumerate(alike)
            for part in _parts_of(
                index, each.parameter, each.local, binding, gathers=whole_matrices
            )
        ]
        batch.stacks = [Stack(same) for same in grouped(parts, id if batch.on_cpu else _shape_of)]
        batches.append(batch)
    for alike in grouped(others, _together):
        batches.append(batch_of(group, alike, ("exp_avg", "exp_avg_sq"), binding))
    return batches


def _together(rows: Rows) -> Any:
    """Return what parameters must have in common to take their step at once."""
    device = rows.local.device
    kernels = device if device.type == "cpu" else (device, rows.local.dtype)
    return kernels, rows.lr_factor, "x" in rows.state


def _shape_of(part: Projection) -> Any:
    """Return what matrices of one stack have in common."""
    factors = [f and (f.layout.local, f.layout.block_sizes) for f in (part.left, part.right)]
    dtype = torch.float64 if part.local.dtype == torch.float64 else torch.float32
    return part.geometry, part.shape, dtype, part.bounds is None, part.is_empty, *factors


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
) -> Iterator[Projection]:
    """Yield the parts of a parameter; ``gathers``: one process takes all rows of a matrix."""
    split = binding.plan.row_splits.get(id(parameter))
    shards = binding.plan.shards.get(id(parameter))
    for rows, layer, _ in binding.shares(parameter):
        if layer is not None:
            full, factor = layer.kind.geometry, layer.a if layer.refreshes else None
        elif rows is not None:
            full, factor = Geometry(1, rows.stop - rows.start, parameter.shape[1:].numel()), None
        else:
            full, factor = binding.plan.matrix_of[id(parameter)], None
        kept, geometry, bounds = rows, full, None
        if shards is not None:
            kept = None if rows is None else shards.own_of(rows)
            count = len(parameter) if rows is None else rows.stop - rows.start
            of_rows = full.of_rows(count, len(rows_here if kept is None else rows_here[kept]))
            assert of_rows is not None  # others were not found to be matrices
            geometry = of_rows
            if gathers and full.groups == 1:
                bounds = bounds_within(shards.bounds[: shards.count + 1], rows)
        left, right = (factor, None) if geometry.transposed else (None, factor)
        part = Projection(
            index, kept, geometry, left, right, local=rows_here, full=full, bounds=bounds
        )
        yield from [part] if split is None else _projections(part, split, shards)


def _projections(
    part: Projection, split: RowSplit, shards: RowShards | None
) -> Iterator[Projection]:
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


def adamw_(batch: Batch, gradients: Sequence[Tensor], lr: float) -> None:
    """Take a step of AdamW without weight decay."""
    weights = batch.weights
    alike = all(w.dtype == g.dtype for w, g in zip(weights, gradients, strict=True))
    is_complex = any(weight.is_complex() for weight in weights)
    device = weights[0].device
    fused = alike and not is_complex and device.type in ("cpu", "cuda")
    if fused and device.type != "cpu":  # fused kernels count on the device
        for state in batch.states:
            state["step"] = state["step"].to(device)
    adamw(
        params=weights,
        grads=list(gradients),
        exp_avgs=batch.moments[0],
        exp_avg_sqs=batch.moments[1],
        max_exp_avg_sqs=[],
        state_steps=[state["step"] for state in batch.states],
        # torch's batched kernels require parameters and state of one dtype; for bfloat16 parameters
        # state is float32
        foreach=alike and not fused,
        fused=fused,
        has_complex=is_complex,
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=lr,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )
