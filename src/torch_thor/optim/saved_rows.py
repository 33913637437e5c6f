"""Turns loaded factors of the rows of weights into those that this process needs.

In the state such a factor is a matrix with the rows of its weight (:mod:`torch_thor.curvature.factor`), and its
blocks end where shards end. So a checkpoint that was saved on some processes can be loaded on others: with
``torch.distributed.checkpoint``, or as a state dict of one process. If the number of shards is another, the factors are
cut again, and blocks that have changed are inverted again.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Cut, cut_again
from torch_thor.curvature.factor import Factor
from torch_thor.curvature.inverse import inverse_of, relative_damping
from torch_thor.curvature.layer import SHARDS, LayerCurvature
from torch_thor.curvature.shards import bounds_within, shard_bounds
from torch_thor.optim.checkpoint import MOMENTS
from torch_thor.optim.parameters import Group, States
from torch_thor.optim.plan import Plan


def fit_loaded_rows(groups: Iterable[Group], states: States, plan: Plan, *, relative: bool) -> None:
    """Turn loaded state into that of this process. What does not fit the layers stays as it is."""
    for parameter in plan.parameters(groups):
        entries, shards = states.get(parameter, {}), plan.shards_of(parameter)
        layers = [share.layer for share in plan.shares(parameter) if share.is_weight]
        factors = [(layer, factor) for layer in layers for factor in layer.stored if factor.by_rows]
        shapes = factors[0][1].shapes() if factors else {}
        if shards is not None:
            for key, kept in [(key, entries[key]) for key in (*MOMENTS, *shapes) if key in entries]:
                is_whole = isinstance(kept, Tensor) and not hasattr(kept, "to_local")
                if is_whole and kept.shape[:1] == parameter.shape[:1]:
                    entries[key] = shards.wrap(kept[shards.own].to(parameter.device, copy=True))
        if not factors or any(getattr(entries.get(key), "shape", None) != shape for key, shape in shapes.items()):
            continue
        before, entries[SHARDS] = int(entries.get(SHARDS, 1)), 1 if shards is None else shards.count
        for layer, factor in factors if before != entries[SHARDS] else ():
            if layer.refreshes:
                _cut_again_(layer, factor, before, len(parameter), relative=relative)


def _cut_again_(layer: LayerCurvature, factor: Factor, before: int, rows: int, *, relative: bool) -> None:
    """Cut a factor at the present shards, and invert the blocks that have changed; others keep their bits."""
    view, damping = layer.weight_view, float(layer.weight_view.options["damping"])
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
        damping = relative_damping(float(trace), new.rows, damping, stored.dtype)
    else:
        damping = math.sqrt(damping / layer.rows_per_term)
    again = inverse_of(stored, damping)
    if again is None:
        raise ValueError(
            f"layer {layer.name!r}: {factor.side} was saved with {before} shards, and its blocks for other shards "
            f"cannot be inverted with the damping {damping:g}; load the checkpoint on {before} processes, or raise "
            f"damping"
        )
    blocks: list[list[tuple[int, int]]] = []  # the block of each row
    for cut in (old, new):
        starts = [(first, run.size) for run in cut.runs for first in range(run.first, run.last, run.size)]
        blocks.append([block for block in starts for _ in range(block[1])])
    changed = torch.tensor([a != b for a, b in zip(*blocks, strict=True)], device=stored.rows.device)[own]
    inverse.rows.copy_(torch.where(changed[:, None], again.rows, inverse.rows))
