"""What each of many processes sends and keeps with THOR, from the shapes and owners of its blocks.

Nothing is run for it.

The processes that train together are divided into groups of `shards`, each of which holds one copy
of the weights: 1 for DDP, all of them for FSDP2, a part for HSDP. Weights are gathered block by
block, as `torch-thor train` divides a network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import factor_dtype
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.layout import why_not_by_rows
from torch_thor.curvature.view import RowShards, State, shard_bounds
from torch_thor.distributed.agreement import HEADER, NUMBERS
from torch_thor.distributed.assignment import Shape, assign, packed_sizes, pads
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.state_dict import MOMENTS
from torch_thor.training.parallel import blocks

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


@dataclass(frozen=True)
class Collective:
    """A collective of `torch.distributed`."""

    name: str  # its name there
    processes: int  # the number of those that take part
    size: int  # the bytes of the tensor; of a gather or scatter, of all its pieces

    @property
    def rounds(self) -> int:
        """The number of times that each process sends to its neighbour in a ring."""
        return (self.processes - 1) * (2 if self.name == "all_reduce" else 1)

    @property
    def sent(self) -> int:
        """The bytes that each process sends in a ring."""
        return self.size if self.name == "broadcast" else self.size * self.rounds // self.processes


def laid_out(
    layers: Iterable[LayerCurvature], processes: int, *, shards: int = 1
) -> list[LayerCurvature]:
    """Return layers as the first process has them, which has the most rows; those given stay.

    Layers that have no curvature there are left out. Their states are new and empty.
    """
    planned_layers = []
    states: dict[nn.Parameter, State] = {}
    for layer in layers:
        view = replace(layer.weight_view, state=states.setdefault(layer.weight, {}))
        if shards > 1 and why_not_by_rows(layer.kind, view.shape) is not None:
            continue
        if shards > 1:
            starts = shard_bounds(view.shape[0], shards)
            by_rows = RowShards(
                count=shards,
                bounds=starts + starts[-1:] * (processes - shards),
                local=slice(0, starts[1]),
                source=0,
                wrap=lambda own: own,
                has_replicas=processes > shards,
            )
            view = replace(view, shards=by_rows, divided=layer.weight)
        planned = LayerCurvature(layer.layer, layer.factor_names)
        planned.bind(planned.laid_out(view))
        planned_layers.append(planned)
    return planned_layers


def blocks_of(
    layers: Iterable[LayerCurvature],
) -> tuple[tuple[Shape, ...], tuple[tuple[int, ...] | None, ...]]:
    """Return the shapes of the equal neighbouring blocks of all factors, and who owns which.

    Owners are as for `assign`: None for blocks that are to be dealt out.
    """
    shapes: list[Shape] = []
    owners: list[tuple[int, ...] | None] = []
    for layout in (factor.layout for layer in layers for factor in layer.stored):
        shapes += layout.block_sizes.blocks
        owners += layout.owners.bounds if layout.owners else [None] * len(layout.block_sizes.blocks)
    return tuple(shapes), tuple(owners)


def collectives_of_refresh(
    layers: Sequence[LayerCurvature], processes: int, sent_as: torch.dtype | None = None
) -> list[Collective]:
    """Return what a refresh with new factors in all layers sends, beside what every step sends.

    The factors of all layers have one dtype.
    """
    if processes == 1 or not layers:
        return []
    shapes, owners = blocks_of(layers)
    every = packed_sizes(shapes, assign(shapes, processes, owners))
    of_rows = packed_sizes(shapes, [known or (0,) * (processes + 1) for known in owners])
    shared = [size - own for size, own in zip(every, of_rows, strict=True)]
    itemsize = (sent_as or factor_dtype(layers[0].weight.dtype)).itemsize
    numbers = (
        HEADER + NUMBERS,  # of `agree`
        sum(2 + len(layer.statistics.group_rows) for layer in layers),
        sum(2 * len(layer.stored) * layer.kind.groups for layer in layers),  # traces
        sum(len(layer.stored) for layer in layers),  # failures
    )
    sent = [
        *(Collective(GATHER, processes, processes * 8 * count) for count in numbers),
        _of_owners(SCATTER, every, itemsize),
        _of_owners(GATHER, shared, 2 * itemsize),  # factors and inverses
    ]
    shards = layers[0].weight_view.shards
    if shards is not None and shards.has_replicas:
        copied = 2 * itemsize * of_rows[shards.source]
        sent.append(Collective("broadcast", processes // shards.count, copied))
    return [each for each in sent if each.size]


def _of_owners(name: str, packed: Sequence[int], itemsize: int) -> Collective:
    """Return what sends triangles to or from their owners, who have so many elements each."""
    if pads(packed):
        return Collective(name, len(packed), itemsize * max(packed) * len(packed))
    has_one_owner = name == GATHER and sum(size > 0 for size in packed) == 1
    return Collective(
        "broadcast" if has_one_owner else "all_reduce", len(packed), itemsize * sum(packed)
    )


def collectives_of_training(model: nn.Module, processes: int, shards: int = 1) -> list[Collective]:
    """Return what DDP, FSDP2 or HSDP sends in every step, with one micro-batch.

    DDP's buckets count as one collective.
    """
    # Each block gathers its weights for the forward and again for the backward pass, the rest of
    # the network once. Then gradients are summed to their owners, and over the copies.
    parts = [(list(block.parameters()), 2) for block in blocks(model) if shards > 1]
    inside = {p for part, _ in parts for p in part}
    parts.append(([p for p in model.parameters() if p not in inside], 1))
    sent = []
    for part, gathers in parts:
        local = sum(own_bytes(p, shards) for p in part)
        trained = sum(own_bytes(p, shards) for p in part if p.requires_grad)
        sent += [Collective(GATHER, shards, shards * local)] * (gathers if trained else 1)
        sent += [
            Collective(SCATTER, shards, shards * trained),
            Collective("all_reduce", processes // shards, trained),
        ]
    return [each for each in sent if each.size and each.processes > 1]


def memory_of(
    optimizer: CurvatureOptimizer, layers: Sequence[LayerCurvature], shards: int = 1
) -> dict[str, int]:
    """Return the bytes that a process keeps, with the layers of `laid_out`; all may be on `meta`.

    `memory` are weights, buffers, gradients, moments of the optimizer and curvature, without
    activations and what communication needs for a while; `curvature` the factors and inverses in
    it; `sums` the statistics, which exist on refresh steps, in addition.
    """
    optimizer._complete(optimizer._binding())
    weights = list(optimizer.model.parameters())
    moments = [state[key] for state in optimizer.state.values() for key in MOMENTS if key in state]
    if not optimizer.form.has_g:
        # ThorMuon gives AdamW, which has two moments, the layers that it leaves out where rows are
        # divided.
        left_out = {layer.weight for layer in optimizer.curvature.values()} - {
            layer.weight for layer in layers
        }
        moments += [optimizer.state[weight]["momentum_buffer"] for weight in left_out]
    gradients = [weight for weight in weights if weight.requires_grad]
    divided = sum(own_bytes(tensor, shards) for tensor in (*weights, *gradients, *moments))
    buffers = sum(buffer.nbytes for buffer in optimizer.model.buffers())
    for layer in layers:
        layer.make_state()
    states = {layer.weight: layer.state for layer in layers}  # some layers share a weight
    curvature = sum(
        entry.nbytes
        for state in states.values()
        for entry in state.values()
        if isinstance(entry, Tensor)
    )
    return {
        "memory": divided + buffers + curvature,
        "curvature": curvature,
        "sums": sum(sums.rows.nbytes for layer in layers for sums in layer.statistics.sums()),
    }


def own_bytes(tensor: Tensor, shards: int) -> int:
    """Return the bytes of a tensor's rows on the first process; all processes send as many."""
    return int(torch.atleast_1d(tensor).chunk(shards)[0].nbytes)
