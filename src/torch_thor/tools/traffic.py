"""What one of many processes sends and keeps with THOR: from the shapes and owners of its blocks, without running it.

The processes that train together are divided into groups of `shards`, each of which holds one copy of the weights: 1
for DDP, all of them for FSDP2, a part for HSDP. Weights are gathered block by block, as `torch-thor train` divides a
network.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.factor import Factor
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.curvature.shards import RowShards, shard_bounds, why_not_by_rows
from torch_thor.distributed.agreement import HEADER, NUMBERS
from torch_thor.distributed.divided import owners_of, turns_of
from torch_thor.distributed.ownership import Shape, deal_out, imbalance, packed_size, packed_sizes, pads
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.checkpoint import MOMENTS
from torch_thor.training.parallel import blocks

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
_NUMBER = 8  # bytes of a number that is gathered: float64
_BUCKET = 25 * 2**20  # bytes of gradients that DDP sends at once


@dataclass(frozen=True)
class Collective:
    """A collective of `torch.distributed`.

    Args:
        name: Its name there.
        processes: The number of those that take part.
        given: Bytes of the tensor that each passes.
        received: Bytes of the tensor that each receives.
    """

    name: str
    processes: int
    given: int
    received: int

    @property
    def sent(self) -> int:
        """The bytes that each process sends in a ring."""
        if self.name == "all_reduce":
            return 2 * self.given * (self.processes - 1) // self.processes
        return self.given if self.name == "broadcast" else abs(self.given - self.received)

    @property
    def rounds(self) -> int:
        """The number of times that each process sends to its neighbour."""
        return (self.processes - 1) * (2 if self.name == "all_reduce" else 1)


@contextmanager
def laid_out(
    layers: Iterable[LayerCurvature], processes: int, *, shards: int = 1, divided: bool = False, rank: int = 0
) -> Iterator[list[LayerCurvature]]:
    """Let layers without state be those of one of many processes.

    Args:
        layers: The layers of an optimizer.
        processes: The number of processes.
        shards: Of how many of them each group holds one copy of the weights.
        divided: Whether the curvature is divided (`divide_curvature=True`).
        rank: The process. With `shards` it must be the first, which never has fewer rows than another.

    Yields:
        The layers that have curvature there: with `shards`, those with a weight whose rows can be divided.
    """
    found, owners = list(layers), {}
    if shards > 1:
        found = [one for one in found if why_not_by_rows(one.kind, tuple(one.weight.shape)) is None]
    try:
        for layer in found if shards > 1 else ():
            rows, view = layer.weight.shape[0], layer.weight_view
            starts = shard_bounds(rows, shards)
            bounds, replicas = (*starts, *[rows] * (processes - shards)), "copies" if processes > shards else None
            divided_rows = RowShards(shards, bounds, slice(0, starts[1]), 0, _unused, _unused, _unused, replicas)
            view.bind(view.entries, view.options, layer.weight, divided_rows)
        owners = owners_of(found, processes, rank) if divided and processes > 1 else {}
        for factor, of_factor in owners.items():
            factor.divided = of_factor
        yield found
    finally:
        for factor in owners:
            factor.divided = None
        for layer in found:
            layer.weight_view.bind(layer.weight_view.entries, layer.weight_view.options)


def _unused(*_: Any) -> Any:
    raise NotImplementedError("nothing is sent while a plan is made")


# ---- the refresh ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The equal neighbouring blocks of a factor."""

    dtype: torch.dtype
    shape: Shape
    owners: tuple[int, ...] | None  # as in `torch_thor.curvature.processes.Bounds`; None before they are dealt out


def blocks_of(layers: Iterable[LayerCurvature]) -> list[Blocks]:
    """Return the blocks of all factors."""
    return [
        Blocks(factor_dtype(layer.weight.dtype), shape, None if factor.owners is None else factor.owners.bounds[i])
        for layer in layers
        for factor in layer.stored
        for i, shape in enumerate(factor.cut.blocks)
    ]


def most_work(layers: Iterable[LayerCurvature], processes: int) -> float:
    """Return how much longer than the mean the process with the most blocks inverts: 1 if all have the same work."""
    found = blocks_of(layers)
    return imbalance([one.shape for one in found], processes, [one.owners for one in found])


def collectives_of_refresh(
    layers: Iterable[LayerCurvature], processes: int, sent_as: torch.dtype | None = None
) -> list[Collective]:
    """Return what a refresh sends in which all layers take new factors, beside what every step sends."""
    layers = list(layers)
    if processes == 1:
        return []
    numbers = [
        HEADER + NUMBERS,  # agreement, row counts, traces
        sum(3 + len(layer.statistics.group_rows) for layer in layers),
        sum(2 * len(layer.sides) * layer.kind.groups for layer in layers),
    ]
    found = blocks_of(layers)
    bounds = deal_out(tuple(one.shape for one in found), processes, tuple(one.owners for one in found))

    def packed(chosen: list[int], itemsize: int) -> list[int]:
        sizes = packed_sizes([found[i].shape for i in chosen], [bounds[i] for i in chosen])
        return [itemsize * size for size in sizes]

    sums, results = [], []
    for dtype in dict.fromkeys(one.dtype for one in found):
        alike = [i for i, one in enumerate(found) if one.dtype == dtype]
        size = (sent_as or dtype).itemsize
        sums.append(_of_owners(SCATTER, packed(alike, size)))
        if shared := [i for i in alike if found[i].owners is None]:
            results.append(_of_owners(GATHER, packed(shared, 2 * size)))
    gathers = [_gather(count, processes) for count in numbers]
    return [*gathers, *sums, _gather(2 * len(found), processes), *results, *_to_copies(layers, processes, sent_as)]


def _to_copies(layers: list[LayerCurvature], processes: int, sent_as: torch.dtype | None) -> list[Collective]:
    """Return what sends blocks and inverses of the rows of a process to those that hold the same rows."""
    elements: defaultdict[torch.dtype, int] = defaultdict(int)
    copies = 1
    for layer in layers:
        for factor in layer.stored:
            if factor.owners is not None and factor.owners.replicas is not None and layer.weight_view.shards:
                own = sum(2 * count * packed_size(size) for count, size in factor.held.blocks)
                elements[factor_dtype(layer.weight.dtype)] += own
                copies = processes // layer.weight_view.shards.count
    sizes = [n * (sent_as or dtype).itemsize for dtype, n in elements.items()]
    return [Collective("broadcast", copies, size, size) for size in sizes]


def _of_owners(name: str, sizes: Sequence[int]) -> Collective:
    """Return what sends blocks to or from their owners, which have so many bytes of them."""
    processes, all_pieces, piece = len(sizes), len(sizes) * max(sizes), max(sizes)
    if not pads(sizes):
        return Collective("all_reduce", processes, sum(sizes), sum(sizes))
    return Collective(name, processes, *((all_pieces, piece) if name == SCATTER else (piece, all_pieces)))


def _gather(numbers: int, processes: int) -> Collective:
    return Collective(GATHER, processes, _NUMBER * numbers, processes * _NUMBER * numbers)


# ---- every step -----------------------------------------------------------------------------------------------------


def collectives_of_inverses(parameters: Iterable[Tensor], layers: Iterable[LayerCurvature]) -> list[Collective]:
    """Return what collects the inverses in every step, if the curvature is divided and all layers are in one group."""
    needs: defaultdict[int, list[Factor]] = defaultdict(list)
    dtypes: dict[Factor, torch.dtype] = {}
    for layer in layers:
        divided = [factor for factor in layer.stored if factor.divided is not None]
        needs[id(layer.weight)] += divided
        dtypes |= dict.fromkeys(divided, factor_dtype(layer.weight.dtype))
    found = []
    for _, factors in turns_of((id(p), needs[id(p)]) for p in parameters if id(p) in needs):
        for dtype in dict.fromkeys(dtypes[factor] for factor in factors):
            alike = [factor for factor in factors if dtypes[factor] is dtype]
            shapes = [shape for factor in alike for shape in factor.cut.blocks]
            bounds = [of_run for factor in alike for of_run in (factor.owners.bounds if factor.owners else ())]
            found.append(_of_owners(GATHER, [dtype.itemsize * n for n in packed_sizes(shapes, bounds)]))
    return found


def collectives_of_training(model: nn.Module, processes: int, shards: int = 1) -> list[Collective]:
    """Return what DDP, FSDP2 or HSDP sends in every step, with one micro-batch.

    For FSDP2, each block gathers its weights for the forward and again for the backward pass, and what is left of the
    network once; then gradients are summed to their owners, and over the copies of HSDP.
    """
    if processes == 1:
        return []
    if shards == 1:
        size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        parts = [_BUCKET] * (size // _BUCKET) + [size % _BUCKET] * (size % _BUCKET > 0)
        return [Collective("all_reduce", processes, part, part) for part in parts]
    found = []
    inside = [list(block.parameters()) for block in blocks(model)]
    taken = {id(p) for part in inside for p in part}
    for number, part in enumerate([*inside, [p for p in model.parameters() if id(p) not in taken]]):
        own, trained = (
            sum(own_bytes(p, shards) for p in part if p.requires_grad or frozen_too) for frozen_too in (True, False)
        )
        times = 2 if number < len(inside) and trained else 1
        found += [Collective(GATHER, shards, own, own * shards)] * times * (own > 0)
        if trained:
            found.append(Collective(SCATTER, shards, trained * shards, trained))
            if processes > shards:
                found.append(Collective("all_reduce", processes // shards, trained, trained))
    return found


# ---- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """The bytes of the process that keeps most, without activations and what communication needs for a while."""

    weights: int  # with the buffers of the network
    gradients: int
    moments: int  # of the optimizer
    curvature: int  # factors and inverses
    sums: int  # of the statistics, which exist on steps that refresh


def memory_of(
    optimizer: CurvatureOptimizer, layers: Iterable[LayerCurvature], processes: int, shards: int = 1
) -> Memory:
    """Compute what a process keeps, with the layers that `laid_out` yields. The parameters may be on `meta`."""
    weights = sum(buffer.nbytes for buffer in optimizer.model.buffers())
    gradients = moments = sums = 0
    for parameter in optimizer.model.parameters():
        weights += own_bytes(parameter, shards)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                state: dict[str, Any] = {}
                optimizer._make_parameter_state(parameter, state, group)
                gradients += own_bytes(parameter, shards)
                moments += sum(own_bytes(state[key], shards) for key in MOMENTS if key in state)
    layers = list(layers)
    for layer in layers:
        itemsize = factor_dtype(layer.weight.dtype).itemsize
        sums += sum(itemsize * factor.cut.rows * factor.cut.width for factor in layer.stored)
    return Memory(weights, gradients, moments, kept_bytes(layers, processes), sums)


def kept_bytes(layers: Iterable[LayerCurvature], processes: int) -> int:
    """Return the size of factors and inverses on the process that keeps most."""
    of_all, of_ranks, seen = 0, [0] * processes, set()
    for layer in layers:
        itemsize = factor_dtype(layer.weight.dtype).itemsize
        of_all += itemsize * layer.kind.groups * layer.kind.routed  # the rows of each group
        for factor in layer.stored:
            row = 2 * itemsize * factor.width  # of the factor and of its inverse
            if factor.by_rows:
                shards = layer.weight_view.shards
                rows = layer.weight.shape[0] if shards is None else shards.own.stop
                of_all += row * rows * ((id(layer.weight), factor.side) not in seen)  # layers of one weight share it
                seen.add((id(layer.weight), factor.side))
            elif factor.owners is None:
                of_all += row * factor.cut.rows
            else:
                for (_, size), bounds in zip(factor.cut.blocks, factor.owners.bounds, strict=True):
                    for rank in range(processes):
                        of_ranks[rank] += row * size * (bounds[rank + 1] - bounds[rank])
    return of_all + max(of_ranks)


def own_bytes(tensor: Tensor, shards: int) -> int:
    """Return the size of the rows of a tensor that the first process holds; all processes send as many."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return -(-rows // shards) * (tensor.numel() // max(rows, 1)) * tensor.element_size()
