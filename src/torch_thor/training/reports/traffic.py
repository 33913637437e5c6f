"""What a refresh sends: the collectives that it starts, and their bytes, computed without starting any."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_thor.curvature.factor import Factor
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.distributed.agreement import HEADER, NUMBERS
from torch_thor.distributed.divided import owners_of, turns_of
from torch_thor.distributed.ownership import Shape, deal_out, packed_size, packed_sizes, pads

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
        for factor in layer.stored:
            for i, shape in enumerate(factor.cut.blocks):
                found.append(Blocks(dtype, shape, None if factor.owners is None else factor.owners.bounds[i]))
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
        dtype = factor_dtype(layer.weight.dtype)
        for factor in layer.stored:
            if factor.owners is not None and factor.owners.replicas is not None:
                own = sum(2 * count * packed_size(size) for count, size in factor.held.blocks)
                elements[dtype] = elements.get(dtype, 0) + own
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
    needs: dict[int, list[Factor]] = {}
    dtypes: dict[Factor, torch.dtype] = {}
    for layer in layers:
        divided = [factor for factor in layer.stored if factor.divided is not None]
        needs.setdefault(id(layer.weight), []).extend(divided)
        dtypes.update(dict.fromkeys(divided, factor_dtype(layer.weight.dtype)))
    for _, factors in turns_of((id(p), needs[id(p)]) for p in parameters if id(p) in needs):
        for dtype in dict.fromkeys(dtypes[factor] for factor in factors):
            alike = [factor for factor in factors if dtypes[factor] is dtype]
            shapes = [shape for factor in alike for shape in factor.cut.blocks]
            bounds = [of_run for factor in alike for of_run in (factor.owners.bounds if factor.owners else ())]
            found.append(from_owners(packed_sizes(shapes, bounds), dtype.itemsize))
    return found


@contextmanager
def divided_among(layers: Sequence[LayerCurvature], processes: int, rank: int) -> Iterator[None]:
    """Let layers without state be those of one of many processes that divide them, to plan with them."""
    owners = owners_of(layers, processes, rank)
    for factor, of_factor in owners.items():
        factor.divided = of_factor
        factor.bind()
    try:
        yield
    finally:
        for factor in owners:
            factor.divided = None
            factor.bind()


def own_bytes(layers: Iterable[LayerCurvature]) -> int:
    """Return the size of the factors and inverses that this process keeps; layers of one weight may share theirs."""
    sizes = {}
    for layer in layers:
        for key, (rows, width) in layer.shapes().items():
            sizes[id(layer.weight), key] = factor_dtype(layer.weight.dtype).itemsize * rows * width
    return sum(sizes.values())
