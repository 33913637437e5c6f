"""What one of many processes sends and keeps with THOR, from the shapes and owners of its blocks.

Nothing is run for it.

The processes that train together are divided into groups of `shards`, each of which holds one copy
of the weights: 1 for DDP, all of them for FSDP2, a part for HSDP. Weights are gathered block by
block, as `torch-thor train` divides a network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import factor_dtype
from torch_thor.curvature.layer import Factor, LayerCurvature
from torch_thor.curvature.layout import why_not_by_rows
from torch_thor.curvature.view import RowShards, shard_bounds
from torch_thor.distributed.agreement import HEADER, NUMBERS
from torch_thor.distributed.assignment import (
    Shape,
    assign,
    imbalance,
    packed_size,
    packed_sizes,
    pads,
)
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.state_dict import MOMENTS
from torch_thor.training.parallel import blocks

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
_BUCKET = 25 * 2**20  # bytes of gradients that DDP sends at once


@dataclass(frozen=True)
class Collective:
    """A collective of `torch.distributed`."""

    name: str  # its name there
    processes: int  # the number of those that take part
    given: int  # the bytes of the tensor that each passes
    received: int  # the bytes of the tensor that each receives

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


def laid_out(
    layers: Iterable[LayerCurvature], processes: int, *, shards: int = 1
) -> list[LayerCurvature]:
    """Return layers as the first process has them, which has the most rows; those given stay.

    Layers that have no curvature there are left out.
    """
    planned_layers = []
    for layer in layers:
        view = layer.weight_view
        if shards > 1 and why_not_by_rows(layer.kind, view.shape) is not None:
            continue
        planned = LayerCurvature(layer.layer, layer.factor_names)
        if shards > 1:
            rows, starts = view.shape[0], shard_bounds(view.shape[0], shards)
            bounds = (*starts, *[rows] * (processes - shards))
            has_replicas = processes > shards
            by_rows = RowShards(shards, bounds, slice(0, starts[1]), 0, _unused, has_replicas)
            view = replace(view, shards=by_rows, divided=layer.weight)
        planned.bind(planned.laid_out(view))
        planned_layers.append(planned)
    return planned_layers


def _unused(*_: Any) -> Any:
    raise NotImplementedError("nothing is sent while a plan is made")


@dataclass(frozen=True)
class Blocks:
    """The equal neighbouring blocks of a factor."""

    dtype: torch.dtype
    shape: Shape
    # as in `torch_thor.curvature.communication.Bounds`; None before they are dealt out
    owners: tuple[int, ...] | None
    copied: int = 0  # of HSDP: how many of them this process holds as others do
    copies: int = 1  # of HSDP: how many processes hold them


def blocks_of(layers: Iterable[LayerCurvature]) -> list[Blocks]:
    """Return the blocks of all factors."""
    return [run for layer in layers for factor in layer.stored for run in _blocks(layer, factor)]


def _blocks(layer: LayerCurvature, factor: Factor) -> list[Blocks]:
    dtype, shards = factor_dtype(layer.weight.dtype), layer.weight_view.shards
    block_sizes, owners = factor.layout.block_sizes, factor.layout.owners
    if owners is None:
        return [Blocks(dtype, shape, None) for shape in block_sizes.blocks]
    runs = []
    for number, (shape, bounds) in enumerate(zip(block_sizes.blocks, owners.bounds, strict=True)):
        local, among = (
            owners.local(number),
            (len(bounds) - 1) // shards.count if shards and owners.has_replicas else 1,
        )
        runs.append(Blocks(dtype, shape, bounds, (local.stop - local.start) * (among > 1), among))
    return runs


def most_work(layers: Iterable[LayerCurvature], processes: int) -> float:
    """Return how much longer than the mean the process with the most blocks inverts.

    It is 1 if all have the same work.
    """
    runs = blocks_of(layers)
    return imbalance([run.shape for run in runs], processes, [run.owners for run in runs])


def collectives_of_refresh(
    layers: Iterable[LayerCurvature], processes: int, sent_as: torch.dtype | None = None
) -> list[Collective]:
    """Return what a refresh with new factors in all layers sends, beside what every step sends."""
    layers = list(layers)
    if processes == 1:
        return []
    blocks = blocks_of(layers)
    assigned = assign(
        tuple(run.shape for run in blocks), processes, tuple(run.owners for run in blocks)
    )
    sums, results, copies = [], [], []
    for dtype in dict.fromkeys(run.dtype for run in blocks):
        itemsize = (sent_as or dtype).itemsize
        alike = [
            (run, bounds)
            for run, bounds in zip(blocks, assigned, strict=True)
            if run.dtype == dtype
        ]
        sums.append(_of_owners(SCATTER, alike, itemsize))
        if shared := [(run, bounds) for run, bounds in alike if run.owners is None]:
            # Factors and inverses are sent, hence the 2; so it is below.
            results.append(_of_owners(GATHER, shared, 2 * itemsize))
        if size := 2 * itemsize * sum(run.copied * packed_size(run.shape[1]) for run, _ in alike):
            copies.append(Collective("broadcast", max(run.copies for run, _ in alike), size, size))
    agreed, rows, traces, failures = (
        Collective(GATHER, processes, 8 * numbers, processes * 8 * numbers)  # in float64
        for numbers in (
            HEADER + NUMBERS,
            sum(2 + len(layer.statistics.group_rows) for layer in layers),
            sum(2 * len(layer.factor_names) * layer.kind.groups for layer in layers),
            sum(len(layer.stored) for layer in layers),
        )
    )
    return [agreed, rows, traces, *sums, failures, *results, *copies]


def _of_owners(
    name: str, blocks: Sequence[tuple[Blocks, Sequence[int]]], itemsize: int
) -> Collective:
    """Return what sends the triangles of blocks to or from their owners."""
    packed = packed_sizes([run.shape for run, _ in blocks], [bounds for _, bounds in blocks])
    piece, every = itemsize * max(packed), itemsize * max(packed) * len(packed)
    if name == GATHER and sum(size > 0 for size in packed) == 1:  # those of one owner
        return Collective("broadcast", len(packed), piece, piece)
    if not pads(packed):
        return Collective("all_reduce", len(packed), itemsize * sum(packed), itemsize * sum(packed))
    return Collective(name, len(packed), *((every, piece) if name == SCATTER else (piece, every)))


def collectives_of_training(model: nn.Module, processes: int, shards: int = 1) -> list[Collective]:
    """Return what DDP, FSDP2 or HSDP sends in every step, with one micro-batch."""
    if processes == 1:
        return []
    if shards == 1:
        size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        parts = [_BUCKET] * (size // _BUCKET) + [size % _BUCKET] * (size % _BUCKET > 0)
        return [Collective("all_reduce", processes, part, part) for part in parts]
    # each block gathers its weights for the forward and again for the backward pass, and what is
    # left of the network once; then gradients are summed to their owners, and over the copies of
    # HSDP
    collectives = []
    inside = [list(block.parameters()) for block in blocks(model)]
    taken = {id(p) for part in inside for p in part}
    for number, part in enumerate([*inside, [p for p in model.parameters() if id(p) not in taken]]):
        local, trained = (
            sum(own_bytes(p, shards) for p in some)
            for some in (part, [p for p in part if p.requires_grad])
        )
        times = 2 if number < len(inside) and trained else 1
        collectives += [Collective(GATHER, shards, local, local * shards)] * times * (local > 0)
        if trained:
            collectives.append(Collective(SCATTER, shards, trained * shards, trained))
            if processes > shards:
                collectives.append(Collective("all_reduce", processes // shards, trained, trained))
    return collectives


@dataclass(frozen=True)
class Memory:
    """The bytes of the process that keeps most, without activations.

    What communication needs for a while is not counted either.
    """

    whole: int  # weights, buffers, gradients, moments of the optimizer, and curvature
    curvature: int  # factors and inverses
    sums: int  # of the statistics, which exist on steps that refresh, in addition


def memory_of(
    optimizer: CurvatureOptimizer, layers: Iterable[LayerCurvature], shards: int = 1
) -> Memory:
    """Compute what a process keeps, with the layers of `laid_out`; all may be on `meta`."""
    layers, tensors = list(layers), list(optimizer.model.parameters())
    names = {layer.name for layer in layers}
    missing = [
        layer
        for layer in optimizer.curvature.values()
        if layer.name not in names and not optimizer.form.has_g
    ]
    plain = {
        id(view.parameter) for layer in missing for view in (layer.weight_view, *layer.layer.biases)
    }
    for group in optimizer.param_groups:
        for parameter in (p for p in group["params"] if p.requires_grad):
            state: dict[str, Any] = {}
            optimizer._make_parameter_state(optimizer._binding(), parameter, state, group)
            moments = [state[key] for key in MOMENTS if key in state]
            # ThorMuon gives AdamW, which has two moments, the layers that it leaves out where rows
            # are divided
            tensors += [parameter, *moments * (1 + (id(parameter) in plain))]  # with its gradient
    curvature = kept_bytes(layers)
    rest = sum(own_bytes(tensor, shards) for tensor in tensors) + sum(
        buffer.nbytes for buffer in optimizer.model.buffers()
    )
    sums = sum(
        factor_dtype(layer.weight.dtype).itemsize
        * factor.layout.block_sizes.rows
        * factor.layout.block_sizes.width
        for layer in layers
        for factor in layer.stored
    )
    return Memory(rest + curvature, curvature, sums)


def kept_bytes(layers: Iterable[LayerCurvature]) -> int:
    """Return the size of factors and inverses on the process that keeps most."""
    size, seen = 0, set()
    for layer in layers:
        itemsize = factor_dtype(layer.weight.dtype).itemsize
        size += itemsize * layer.kind.groups * layer.kind.has_own_rows  # the rows of each group
        for factor in layer.stored:
            rows = factor.layout.block_sizes.rows
            if factor.layout.by_rows:
                if (id(layer.weight), factor.side) in seen:  # layers of one weight share it
                    continue
                seen.add((id(layer.weight), factor.side))
                shards = layer.weight_view.shards
                rows = layer.weight.shape[0] if shards is None else shards.local.stop
            size += 2 * itemsize * factor.layout.shape[1] * rows  # the factor and its inverse
    return size


def own_bytes(tensor: Tensor, shards: int) -> int:
    """Return the bytes of a tensor's rows on the first process; all processes send as many."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return -(-rows // shards) * (tensor.numel() // max(rows, 1)) * tensor.element_size()
