"""The form in which state dicts hold the factors of the rows of a weight: the same however the rows are divided.

In a state dict such a factor is a matrix of rows (:mod:`torch_thor.curvature.factor_rows`), also for a process that
trains alone, together with the number of shards at whose boundaries its blocks end. So a checkpoint that was saved on
some processes can be loaded on others: with ``torch.distributed.checkpoint``, or as a state dict of one process. If the
number of shards is another, the factors are cut again, and blocks that have changed are inverted again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.block_layout import BlockLayout
from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.factor_rows import block_of_each_row, cut_again, from_rows, shard_bounds, to_rows
from torch_thor.curvature.inverse import NewBlocks, invert_own_, relative_damping
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.row_shards import (
    RowShards,
    ShardedLayout,
    bounds_within,
    local,
    side_of_rows,
    why_not_by_rows,
)
from torch_thor.optim.checkpoint import MOMENTS, StateDict
from torch_thor.optim.parameters import Group
from torch_thor.optim.thor.parameter_index import ParameterIndex

SHARDS = "row_shards"  # the key of the number of shards


def as_rows(state_dict: StateDict, groups: Iterable[Group], index: ParameterIndex) -> StateDict:
    """Return a state dict in the form in which it is saved.

    Args:
        state_dict: the state dict of the optimizer; not changed.
        groups: the optimizer's parameter groups.
        index: the index of the parameters, which knows the layers of each.

    Returns:
        A state dict that shares its tensors where it can.
    """
    state = dict(state_dict["state"])
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for i, parameter in zip(saved["params"], group["params"], strict=True):
            layers = _layers_by_rows(parameter, index)
            if layers and i in state:
                state[i] = _saved(state[i], layers, len(parameter))
    return {**state_dict, "state": state}


def load_rows(
    states: Mapping[Tensor, dict[str, Any]], groups: Iterable[Group], index: ParameterIndex, *, relative: bool
) -> None:
    """Turn loaded state into the form in which this process holds it.

    State without rows, which an earlier version has saved, stays as it is. So does what does not fit the layers.

    Args:
        states: the optimizer's state, as it was loaded; changed in place.
        groups: the optimizer's parameter groups, with the options that were loaded.
        index: the index of the parameters.
        relative: whether damping is relative to the mean diagonal of each factor.

    Raises:
        ValueError: a factor that has been cut again cannot be inverted.
    """
    for group in groups:
        for parameter in group["params"]:
            entries, shards = states.get(parameter), index.shards_of(parameter)
            if entries is None:
                continue
            if shards is not None:
                for key in MOMENTS:
                    if key in entries:
                        entries[key] = _divided(entries[key], shards, parameter)
            before = int(entries.pop(SHARDS, 1))
            layers = _layers_by_rows(parameter, index)
            for side in dict.fromkeys(side_of_rows(layer.kind) for layer in layers):
                its_layers = [layer for layer in layers if side_of_rows(layer.kind) == side]
                _load_side(entries, side, its_layers, parameter, before, relative=relative)


def _layers_by_rows(parameter: nn.Parameter, index: ParameterIndex) -> list[LayerCurvature]:
    """Return the layers of a weight whose factor of its rows is saved as rows."""
    found = []
    for share in index.shares(parameter):
        kind, is_weight = share.layer.kind, share.is_weight and side_of_rows(share.layer.kind) in share.layer.sides
        if is_weight and why_not_by_rows(kind, tuple(parameter.shape)) is None:
            found.append(share.layer)
    return found


def _saved(entries: Mapping[str, Any], layers: Iterable[LayerCurvature], rows: int) -> dict[str, Any]:
    """Return the state of a weight of so many rows in the form in which it is saved."""
    found, whole = dict(entries), {}
    for layer in layers:
        side, view = side_of_rows(layer.kind), layer.weight_view
        if layer.prefix + side not in entries and side not in entries:
            continue
        if view.shards is not None:
            found[SHARDS] = view.shards.count
            continue
        found[SHARDS] = 1
        for name in (side, f"{side}_inverse"):
            for key in (layer.prefix + name, f"{layer.prefix}{name}_tail"):
                found.pop(key, None)
            own = to_rows(layer.stored.read(name), layer.stored.width(side))
            if view.rows is None:
                whole[name] = own
            else:
                view.of(whole.setdefault(name, own.new_zeros((rows, own.shape[1])))).copy_(own)
    return {**found, **whole}


def _divided(tensor: Any, shards: RowShards, parameter: nn.Parameter) -> Any:
    """Return the rows of this process, as a tensor of the state, if it is a whole tensor that fits the parameter."""
    if not isinstance(tensor, Tensor) or hasattr(tensor, "to_local") or len(tensor) != len(parameter):
        return tensor
    return shards.wrap(tensor[shards.own].to(parameter.device, copy=True))


def _load_side(
    entries: dict[str, Any],
    side: str,
    layers: Sequence[LayerCurvature],
    parameter: nn.Parameter,
    before: int,
    *,
    relative: bool,
) -> None:
    """Replace the rows of a factor and of its inverse, of all layers of a weight, by what this process holds."""
    names, shards = (side, f"{side}_inverse"), layers[0].weight_view.shards
    shape = (len(parameter), layers[0].stored.width(side))
    if any(tuple(getattr(entries.get(name), "shape", ())) != shape for name in names):
        return
    if shards is not None:
        entries.update({name: _divided(entries[name], shards, parameter) for name in names})
    whole = [local(entries[name]) if shards is not None else entries.pop(name) for name in names]
    for layer in layers:
        view, layout = layer.weight_view, layer.layouts()[side]
        at = slice(None) if view.local_rows is None else view.local_rows
        factor, inverse = (rows[at] for rows in whole)
        count = 1 if shards is None else shards.count
        if before != count and layer.refreshes:
            factor, inverse = _cut_again(layer, factor, inverse, before, count, len(parameter), relative=relative)
        for name, rows, loaded in zip(names, (factor, inverse), whole, strict=True):
            if isinstance(layout, ShardedLayout):
                loaded[at] = rows
                continue
            parts = [p.clone(memory_format=torch.contiguous_format) for p in from_rows(rows, layout).parts()]
            entries.update(zip((layer.prefix + name, f"{layer.prefix}{name}_tail"), parts, strict=False))


def _cut_again(
    layer: LayerCurvature, factor: Tensor, inverse: Tensor, before: int, count: int, rows: int, *, relative: bool
) -> tuple[Tensor, Tensor]:
    """Return a factor and its inverse for other blocks; blocks that stay the same keep their inverse to the last bit.

    Args:
        layer: the layer.
        factor: the rows of the factor that this process holds.
        inverse: those of its inverse.
        before: the number of shards at whose boundaries the blocks end.
        count: the number at which they are to end.
        rows: the number of rows of the whole weight.
        relative: whether damping is relative to the mean diagonal.

    Returns:
        The rows of both.

    Raises:
        ValueError: a block cannot be inverted.
    """
    side, view = side_of_rows(layer.kind), layer.weight_view
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
