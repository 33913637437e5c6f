"""What a refresh sends: the collectives that it starts, and their bytes, computed without starting any."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.curvature.row_shards import ShardedLayout
from torch_thor.distributed.agreement import HEADER, NUMBERS
from torch_thor.distributed.divided import owners_of, turns_of
from torch_thor.distributed.ownership import Shape, deal_out, packed_sizes, pads
from torch_thor.distributed.triangles import packed_size

_NUMBER = 8  # bytes of a number that is gathered: float64


@dataclass(frozen=True)
class Collective:
    """One collective of a refresh."""

    name: str  # its name in `torch.distributed`
    given: int  # the bytes of the tensor that each rank passes
    received: int  # the bytes of the tensor that each rank receives

    def sent(self, processes: int) -> int:
        """Return the bytes that each rank sends in a ring."""
        if self.name == "all_reduce":
            return 2 * self.given * (processes - 1) // processes
        if self.name == "broadcast":
            return self.given
        return max(self.given, self.received) - min(self.given, self.received)


@dataclass(frozen=True)
class Blocks:
    """One tensor of blocks."""

    dtype: torch.dtype  # their dtype
    shape: Shape  # their number and size
    owners: tuple[int, ...] | None = None


def blocks_of(layers: Iterable[LayerCurvature]) -> list[Blocks]:
    """Return the blocks of all factors."""
    found: list[Blocks] = []
    for layer in layers:
        dtype = factor_dtype(layer.weight.dtype)
        for side, layout in layer.layouts().items():
            divided = layer.stored.owners.get(side)
            if isinstance(layout, ShardedLayout):
                found += [Blocks(dtype, shape[:2], owners) for shape, owners in layout.parts]
                continue
            shapes = [shape[:2] for shape in layout.shapes if shape is not None]
            for i, shape in enumerate(shapes):
                found.append(Blocks(dtype, shape, None if divided is None else divided.bounds[i]))
    return found


def collectives_of_refresh(
    layers: Iterable[LayerCurvature], processes: int, sent_as: torch.dtype | None = None
) -> list[Collective]:
    """Return the collectives of a refresh in which all layers take new factors."""
    layers = list(layers)
    counts = sum(3 + len(layer.statistics.group_rows) for layer in layers)
    traces = sum(2 * len(layer.sides) * layer.kind.groups for layer in layers)
    blocks = blocks_of(layers)
    bounds = deal_out(tuple(one.shape for one in blocks), processes, tuple(one.owners for one in blocks))
    alike: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for i, one in enumerate(blocks):
        alike[one.dtype].append(i)
    sums, results = [], []
    for dtype, members in alike.items():
        sizes = packed_sizes([blocks[i].shape for i in members], [bounds[i] for i in members])
        itemsize = (sent_as or dtype).itemsize
        sums.append(_to_owners(sizes, itemsize))
        shared = [i for i in members if blocks[i].owners is None]
        if shared:
            sizes = packed_sizes([blocks[i].shape for i in shared], [bounds[i] for i in shared])
            results.append(from_owners(sizes, 2 * itemsize))
    before = [_gather(count, processes) for count in (HEADER + NUMBERS, counts, traces)]
    return [*before, *sums, _gather(2 * len(blocks), processes), *results, *_to_replicas(layers, sent_as)]


def _to_replicas(layers: Iterable[LayerCurvature], sent_as: torch.dtype | None) -> list[Collective]:
    """Return the collectives that send blocks and inverses of the rows of this rank to those that hold the same."""
    elements: dict[torch.dtype, int] = {}
    for layer in layers:
        shards, dtype = layer.weight_view.shards, factor_dtype(layer.weight.dtype)
        for layout in layer.layouts().values():
            if isinstance(layout, ShardedLayout) and shards is not None and shards.replicas is not None:
                own = [shape for shape in layout.local.shapes if shape is not None and layout.own]
                elements[dtype] = elements.get(dtype, 0) + sum(2 * shape[0] * packed_size(shape[1]) for shape in own)
    sizes = [n * (sent_as or dtype).itemsize for dtype, n in elements.items()]
    return [Collective("broadcast", size, size) for size in sizes]


def _to_owners(sizes: Sequence[int], itemsize: int) -> Collective:
    if not pads(sizes):
        return Collective("all_reduce", sum(sizes) * itemsize, sum(sizes) * itemsize)
    piece = max(sizes) * itemsize
    return Collective("reduce_scatter_tensor", len(sizes) * piece, piece)


def from_owners(sizes: Sequence[int], itemsize: int) -> Collective:
    """Return the collective that sends blocks from their owners to all ranks."""
    if not pads(sizes):
        return Collective("all_reduce", sum(sizes) * itemsize, sum(sizes) * itemsize)
    piece = max(sizes) * itemsize
    return Collective("all_gather_into_tensor", piece, len(sizes) * piece)


def _gather(numbers: int, processes: int) -> Collective:
    return Collective("all_gather_into_tensor", _NUMBER * numbers, processes * _NUMBER * numbers)


def collectives_of_step(parameters: Iterable[Tensor], layers: Iterable[LayerCurvature]) -> list[Collective]:
    """Return the collectives of a step that collect the inverses, if all layers have them and are in one group."""
    found = []
    needs: defaultdict[int, dict[LayerCurvature, tuple[str, ...]]] = defaultdict(dict)
    for one in layers:
        needs[id(one.weight)][one] = tuple(one.stored.owners)
    for _, needed in turns_of((id(p), needs[id(p)]) for p in parameters if id(p) in needs):
        shapes: defaultdict[torch.dtype, list[Shape]] = defaultdict(list)
        bounds: defaultdict[torch.dtype, list[tuple[int, ...]]] = defaultdict(list)
        for layer, sides in needed.items():
            dtype = factor_dtype(layer.weight.dtype)
            for owners in (layer.stored.owners[side] for side in sides):
                shapes[dtype] += [shape[:2] for shape in owners.layout.shapes if shape is not None]
                bounds[dtype] += owners.bounds
        found += [from_owners(packed_sizes(shapes[dtype], bounds[dtype]), dtype.itemsize) for dtype in shapes]
    return found


@contextmanager
def divided_among(layers: Sequence[LayerCurvature], processes: int, rank: int) -> Iterator[None]:
    """Let layers without state be those of one of many processes that divide them, to plan with them."""
    owners = owners_of(layers, processes, rank)
    for layer in layers:
        layer.stored.owners = {side: owners[layer.name, side] for side in layer.sides if (layer.name, side) in owners}
    try:
        yield
    finally:
        for layer in layers:
            layer.stored.owners = {}


def own_bytes(layers: Iterable[LayerCurvature]) -> int:
    """Return the size of the blocks that this process keeps."""
    size = 0
    for layer in layers:
        for owners in layer.stored.owners.values():
            elements = sum(math.prod(shape) for shape in owners.shapes if shape is not None)
            size += 2 * factor_dtype(layer.weight.dtype).itemsize * elements
    return size
