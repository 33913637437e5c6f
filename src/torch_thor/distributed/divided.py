"""Curvature that is divided among the processes (``divide_curvature=True``): each block has one owner.

The owner of a block, which is the process that inverts it, is the only one that keeps it and its inverse. So n
processes need about 1 / n of the memory each, and a refresh sends the sums of the factors alone. In return every step
collects the inverses, one group of layers after the other, and drops them when it has used them. That sends less than
the weights have elements, because only the triangles of blocks are sent. KAISA (Pauloski et al., SC 2021) has the same
choice between memory and communication for whole layers.

The factor of the rows of a sharded weight (FSDP2) is divided with the rows already. Then only the other factor has
owners.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_thor.curvature.block_layout import BlockLayout
from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.owned_blocks import BlockOwners
from torch_thor.curvature.processes import Processes
from torch_thor.curvature.row_shards import ShardedLayout
from torch_thor.distributed.ownership import deal_out
from torch_thor.distributed.triangles import packed_size

# The inverses that are collected at once have about so many elements: 32 MB in float32.
ELEMENTS = 2**23


def owners_of(layers: Iterable[LayerCurvature], processes: int, rank: int) -> dict[tuple[str, str], BlockOwners]:
    """Deal out the blocks of all factors that are not divided with the rows of a weight."""
    sides: list[tuple[tuple[str, str], BlockLayout]] = []
    shapes: list[tuple[int, int]] = []
    fixed: list[tuple[int, ...] | None] = []
    for layer in layers:
        for side, layout in layer.layouts().items():
            if isinstance(layout, ShardedLayout):
                shapes += [shape[:2] for shape, _ in layout.parts]
                fixed += [owners for _, owners in layout.parts]
                continue
            sides.append(((layer.name, side), layout))
            of_side = [shape[:2] for shape in layout.shapes if shape is not None]
            shapes += of_side
            fixed += [None] * len(of_side)
    dealt = deal_out(tuple(shapes), processes, tuple(fixed))
    free = iter([tuple(bounds) for bounds, known in zip(dealt, fixed, strict=True) if known is None])
    return {
        name: BlockOwners(layout, tuple(next(free) for shape in layout.shapes if shape is not None), rank)
        for name, layout in sides
    }


def divide(layers: Sequence[LayerCurvature], processes: Processes) -> None:
    """Divide the curvature of all layers among the processes. Of factors that are in the state, the own blocks stay."""
    new = [layer for layer in layers if not layer.stored.owners]
    if processes.count == 1 or not new:
        return
    owners = owners_of(new, processes.count, processes.rank)
    sides = {layer: [side for side in layer.sides if (layer.name, side) in owners] for layer in new}
    kept, keys = [], []
    for layer in new:
        if layer.stored.are_there():
            for name in [f"{side}{end}" for side in sides[layer] for end in ("", "_inverse")]:
                whole = layer.stored.read(name)
                assert isinstance(whole, BlockDiagonal)  # nothing of it has been divided so far
                kept.append((layer, name, owners[layer.name, name[0]].take(whole)))
                keys += [(layer, name), (layer, layer.prefix + name), (layer, f"{layer.prefix}{name}_tail")]
    for layer, key in keys:  # several layers may be rows of one entry, which all have been read now
        layer.state.pop(key, None)
    for layer in new:
        layer.stored.owners = {side: owners[layer.name, side] for side in sides[layer]}
        layer.stored.exchange = processes.exchange
    for layer, name, blocks in kept:
        layer.stored.write(name, blocks)


def whole_entries(layers: Sequence[LayerCurvature]) -> Iterator[tuple[LayerCurvature, dict[str, Tensor]]]:
    """Collect the factors and inverses of all layers. All processes must consume it."""
    for layer in layers:
        names = [f"{side}{end}" for side in layer.stored.owners for end in ("", "_inverse")]
        entries: dict[str, Tensor] = {}
        for name, whole in zip(names, layer.stored.whole(names) if names else (), strict=True):
            key = layer.prefix + name
            entries.update(zip((key, f"{key}_tail"), whole.parts(), strict=False))
        yield layer, entries


# the turns of an update if all inverses are on all processes
ALL_AT_ONCE: tuple[None, ...] = (None,)


class DividedInverses:
    """Collects the inverses of the layers for the update rule."""

    def turns(self, group: Mapping[str, Any], plan: Any) -> Iterator[frozenset[int]]:
        """Collect the inverses of one parameter group, some layers at a time. All processes must consume it."""
        for parameters, needed in turns_of(_needs(group, plan)):
            try:
                _collect(needed)
                yield parameters
            finally:
                for layer in needed:
                    layer.stored.collected = {}


# the layers of a turn, each with the sides that are needed
Needed = Mapping[LayerCurvature, tuple[str, ...]]


def _needs(group: Mapping[str, Any], plan: Any) -> Iterator[tuple[int, Needed]]:
    """Yield each preconditioned parameter of a group, with the inverses that it needs."""
    for parameter in group["params"]:
        needed: dict[LayerCurvature, tuple[str, ...]] = {}
        for share in plan.shares(parameter):
            if share.layer.refreshes:
                owned = share.layer.stored.owners
                needed[share.layer] = tuple(side for side in owned if share.is_weight or side == "G")
        if needed:
            yield id(parameter), needed


def turns_of(needs: Iterable[tuple[int, Needed]]) -> Iterator[tuple[frozenset[int], Needed]]:
    """Divide parameters into turns, each with about ``ELEMENTS`` elements of inverses."""
    parameters: list[int] = []
    of_turn: dict[LayerCurvature, tuple[str, ...]] = {}
    size = 0
    for parameter, needed in needs:
        new = sum(elements_of(layer, {*sides} - {*of_turn.get(layer, ())}) for layer, sides in needed.items())
        if size and new and size + new > ELEMENTS:
            yield frozenset(parameters), of_turn
            parameters, of_turn, size = [], {}, 0
            new = sum(elements_of(layer, sides) for layer, sides in needed.items())
        parameters.append(parameter)
        for layer, sides in needed.items():
            of_turn[layer] = tuple(dict.fromkeys((*of_turn.get(layer, ()), *sides)))
        size += new
    if parameters:
        yield frozenset(parameters), of_turn


def elements_of(layer: LayerCurvature, sides: Iterable[str]) -> int:
    """Return the number of elements that the inverses of a layer have when they are sent."""
    shapes = itertools.chain(*(layer.stored.owners[side].layout.shapes for side in sides))
    return sum(shape[0] * packed_size(shape[1]) for shape in shapes if shape is not None)


def _collect(needed: Needed) -> None:
    """Collect the inverses of some layers, with one collective for each dtype and device."""
    found: list[tuple[LayerCurvature, dict[str, BlockDiagonal]]] = []
    parts: list[Tensor] = []
    bounds: list[Any] = []
    for layer, sides in needed.items():
        whole = {}
        for side in sides:
            own: Any = layer.stored.read(f"{side}_inverse")
            whole[side] = own.spread()
            parts += whole[side].parts()
            bounds += own.owners.bounds
        found.append((layer, whole))
    exchange = next((layer.stored.exchange for layer in needed), None)
    if parts and exchange is not None:
        exchange.share_(parts, bounds)
    for layer, whole in found:
        layer.stored.collected = whole
