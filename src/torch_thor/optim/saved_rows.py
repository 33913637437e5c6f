"""Turns loaded factors of the rows of weights into those that this process needs.

In the state such a factor is a matrix with the rows of its weight (:mod:`torch_thor.curvature.stored_factors`), and its
blocks end where shards end. So a checkpoint that was saved on some processes can be loaded on others: with
``torch.distributed.checkpoint``, or as a state dict of one process. If the number of shards is another, the factors are
cut again, and blocks that have changed are inverted again.
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.block_layout import BlockLayout
from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.factor_rows import block_of_each_row, cut_again, from_rows, shard_bounds, to_rows
from torch_thor.curvature.inverse import NewBlocks, invert_own_, relative_damping
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.layer_state import SHARDS
from torch_thor.curvature.row_shards import RowShards, ShardedLayout, bounds_within, local
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
            by_rows = [layer for layer in layers if layer.stored.side_by_rows]
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
    side, count = str(layers[0].stored.side_by_rows), 1 if shards is None else shards.count
    names, shape = (side, f"{side}_inverse"), (len(parameter), layers[0].stored.width(side))
    if any(tuple(getattr(entries.get(name), "shape", ())) != shape for name in names):
        return
    before = int(entries.get(SHARDS, 1))
    entries[SHARDS] = count
    if shards is not None:
        entries.update({name: _divided(entries[name], shards, parameter) for name in names})
    if before == count:
        return
    for layer in layers:
        if layer.refreshes:
            at = slice(None) if layer.weight_view.local_rows is None else layer.weight_view.local_rows
            factor, inverse = (local(entries[name])[at] for name in names)
            again = _cut_again(layer, factor, inverse, before, count, len(parameter), relative=relative)
            for old, new in zip((factor, inverse), again, strict=True):
                old.copy_(new)


def join_blocks(
    entries: MutableMapping[str, Any], name: str, layers: Iterable[LayerCurvature], shape: tuple[int, int]
) -> None:
    """Replace the blocks of all layers of a weight by one matrix of rows."""
    found = []
    for layer in layers:
        key, view = layer.prefix + name, layer.weight_view
        rows = shape[0] if view.rows is None else view.rows.stop - view.rows.start
        layout = BlockLayout.of(1, rows, 1 if shape[1] == 1 else view.split_dim)
        blocks, tail = entries.get(key), entries.get(f"{key}_tail")
        shapes = tuple(tuple(part.shape) if isinstance(part, Tensor) else None for part in (blocks, tail))
        if not isinstance(blocks, Tensor) or shapes != layout.shapes:
            return
        found.append((key, view, to_rows(BlockDiagonal(layout, blocks, tail), shape[1])))
    whole = found[0][2].new_zeros(shape)
    for key, view, rows in found:
        entries.pop(key)
        entries.pop(f"{key}_tail", None)
        view.of(whole).copy_(rows)
    entries[name] = whole


def _divided(tensor: Any, shards: RowShards, parameter: nn.Parameter) -> Any:
    """Return the rows of this process, as a tensor of the state, if it is a whole tensor that fits the parameter."""
    if not isinstance(tensor, Tensor) or hasattr(tensor, "to_local") or len(tensor) != len(parameter):
        return tensor
    return shards.wrap(tensor[shards.own].to(parameter.device, copy=True))


def _cut_again(
    layer: LayerCurvature, factor: Tensor, inverse: Tensor, before: int, count: int, rows: int, *, relative: bool
) -> tuple[Tensor, Tensor]:
    """Return a factor and its inverse for other blocks; equal blocks keep their inverse to the last bit."""
    side, view = str(layer.stored.side_by_rows), layer.weight_view
    split_dim = 1 if side == "A" and layer.kind.diagonal_input else view.split_dim
    first = 0
    if view.shards is not None:
        first = max(view.shards.own.start - (view.rows.start if view.rows is not None else 0), 0)
    own = slice(first, first + len(factor))
    old, new = (
        block_of_each_row(bounds_within(shard_bounds(rows, shards), view.rows), split_dim)[:, own]
        for shards in (before, count)
    )
    factor = cut_again(factor, old, new)
    layout = layer.layouts()[side]
    of_own: BlockLayout = layout.local if isinstance(layout, ShardedLayout) else layout
    blocks, damping = from_rows(factor, of_own), float(view.options["damping"])
    if relative:
        trace = blocks.group_traces().sum()
        trace = trace if view.shards is None else view.shards.total(trace)
        damping = relative_damping(float(trace), layout.size, damping, factor.dtype)
    else:
        damping = math.sqrt(damping / layer.rows_per_term)
    parts = [NewBlocks(part, [damping]) for part in blocks.parts()]
    invert_own_([(one, one.blocks, one.blocks.new_full((len(one.blocks),), damping)) for one in parts])
    if any(one.failed for one in parts):
        raise ValueError(
            f"layer {layer.name!r}: {side} was saved with {before} shards, and its blocks for {count} cannot be "
            f"inverted with the damping {damping:g}; load the checkpoint on {before} processes, or raise damping"
        )
    again = to_rows(BlockDiagonal(of_own, *[one.inverse for one in parts]), factor.shape[1])
    changed = (old != new).any(0).to(factor.device)
    return factor, torch.where(changed[:, None], again, inverse)
