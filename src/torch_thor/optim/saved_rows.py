"""Turns loaded factors of the rows of weights into those that this process needs.

In the state such a factor is a matrix with the rows of its weight (:mod:`torch_thor.curvature.factor`), and its
blocks end where shards end. So a checkpoint that was saved on some processes can be loaded on others: with
``torch.distributed.checkpoint``, or as a state dict of one process. If the number of shards is another, the factors are
cut again, and blocks that have changed are inverted again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Cut, cut_again, first_rows
from torch_thor.curvature.factor import Factor
from torch_thor.curvature.inverse import inverse_of, relative_damping
from torch_thor.curvature.layer import SHARDS, LayerCurvature
from torch_thor.curvature.shards import RowShards, bounds_within, shard_bounds
from torch_thor.optim.checkpoint import MOMENTS
from torch_thor.optim.parameters import Group
from torch_thor.optim.plan import Plan


def fit_loaded_rows(
    states: Mapping[Tensor, dict[str, Any]], groups: Iterable[Group], plan: Plan, *, relative: bool
) -> None:
    """Turn loaded state into that of this process. What does not fit the layers stays as it is."""
    for group in groups:
        for parameter in group["params"]:
            entries, shards = states.get(parameter), plan.shards_of(parameter)
            if entries is None:
                continue
            if shards is not None:
                entries.update({key: _divided(entries[key], shards, parameter) for key in MOMENTS if key in entries})
            layers = [share.layer for share in plan.shares(parameter) if share.is_weight]
            by_rows = [layer for layer in layers if any(factor.by_rows for factor in layer.stored)]
            if by_rows:
                _fit(entries, by_rows, parameter, shards, relative=relative)


def _fit(
    entries: dict[str, Any],
    layers: Sequence[LayerCurvature],
    parameter: nn.Parameter,
    shards: RowShards | None,
    *,
    relative: bool,
) -> None:
    """Replace the rows of the factors, and of their inverses, of all layers of a weight."""
    factors = [(layer, factor) for layer in layers for factor in layer.stored if factor.by_rows]
    count, shapes = 1 if shards is None else shards.count, factors[0][1].shapes()
    if any(tuple(getattr(entries.get(key), "shape", ())) != shape for key, shape in shapes.items()):
        return
    before = int(entries.get(SHARDS, 1))
    entries[SHARDS] = count
    if shards is not None:
        entries.update({key: _divided(entries[key], shards, parameter) for key in shapes})
    if before == count:
        return
    for layer, factor in factors:
        if layer.refreshes:
            _cut_again_(layer, factor, before, len(parameter), relative=relative)


def _divided(tensor: Any, shards: RowShards, parameter: nn.Parameter) -> Any:
    """Return the rows of this process, as a tensor of the state, if it is a whole tensor that fits the parameter."""
    if not isinstance(tensor, Tensor) or hasattr(tensor, "to_local") or len(tensor) != len(parameter):
        return tensor
    return shards.wrap(tensor[shards.own].to(parameter.device, copy=True))


def _cut_again_(layer: LayerCurvature, factor: Factor, before: int, rows: int, *, relative: bool) -> None:
    """Cut a factor at the present shards, and invert the blocks that have changed; others keep their bits."""
    view, options = layer.weight_view, layer.weight_view.options
    edges = bounds_within(shard_bounds(rows, before), view.rows)
    split_dim = 1 if factor.cut.is_diagonal else view.split_dim
    old, new = Cut.of(factor.cut.rows, split_dim, edges=edges), factor.cut
    own = slice(None)  # the rows of the layer that this process holds
    if view.shards is not None:
        first = max(view.shards.own.start - (view.rows.start if view.rows is not None else 0), 0)
        own = slice(first, first + factor.held.rows)
    stored, inverse = factor.read(), factor.read(inverse=True)
    moved = torch.zeros((new.rows, stored.rows.shape[1]), dtype=stored.dtype, device=stored.rows.device)
    moved[own] = stored.rows
    stored.rows.copy_(cut_again(moved, old, new)[own])
    if relative:
        trace = stored.traces().sum()
        trace = trace if view.shards is None else view.shards.total(trace)
        damping = relative_damping(float(trace), new.rows, float(options["damping"]), stored.dtype)
    else:
        damping = math.sqrt(float(options["damping"]) / layer.rows_per_term)
    again = inverse_of(stored, damping)
    if again is None:
        raise ValueError(
            f"layer {layer.name!r}: {factor.side} was saved with {before} shards, and its blocks for other shards "
            f"cannot be inverted with the damping {damping:g}; load the checkpoint on {before} processes, or raise "
            f"damping"
        )
    places = [[(run.first, run.size) for run in cut.runs for _ in range(run.count * run.size)] for cut in (old, new)]
    starts = [list(first_rows(cut)) for cut in (old, new)]
    changed = [a != b or p[1] != q[1] for a, b, p, q in zip(*starts, *places, strict=True)]
    mask = torch.tensor(changed, device=stored.rows.device)[own]
    inverse.rows.copy_(torch.where(mask[:, None], again.rows, inverse.rows))
