"""Curvature divided among the processes (``divide_curvature=True``), with one owner per block.

The owner of a block, which is the process that inverts it, is the only one that keeps it and its
inverse. So n processes need about 1 / n of the memory each, and a refresh sends the sums of the
factors alone. In return every step collects the inverses, one group of layers after the other, and
drops them when it has used them. That sends less than the weights have elements, because only the
triangles of blocks are sent. KAISA (Pauloski et al., SC 2021) has the same choice between memory
and communication for whole layers.

The factor of the rows of a sharded weight (FSDP2) is divided with the rows already. Then only the
other factor has owners. The factors of grouped convolutions and experts stay on all processes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.communication import Processes
from torch_thor.curvature.factor import Factor
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.layout import Owners, layout_of
from torch_thor.distributed.assignment import deal_out, packed_size

# The inverses that are collected at once have about so many elements: 32 MB in float32.
ELEMENTS = 2**23


# the owners of the blocks of factors, by layer and side
OwnersOf = dict[LayerCurvature, dict[str, Owners]]


def owners_of(layers: Iterable[LayerCurvature], processes: Processes) -> OwnersOf:
    """Deal out the blocks of all factors that are not divided with the rows of a weight."""
    factors = [(layer, factor) for layer in layers for factor in layer.stored]
    shapes = tuple(block for _, factor in factors for block in factor.layout.cut.blocks)
    fixed: list[tuple[int, ...] | None] = []
    for layout in (factor.layout for _, factor in factors):
        fixed += [None] * len(layout.cut.blocks) if layout.owners is None else layout.owners.bounds
    dealt = iter(deal_out(shapes, processes.count, tuple(fixed)))
    owners: OwnersOf = {}
    for layer, factor in factors:
        bounds = tuple(tuple(next(dealt)) for _ in factor.layout.cut.blocks)
        if factor.layout.owners is None and factor.layout.cut.groups == 1:
            of_factor = Owners(bounds, processes.rank, processes=processes)
            owners.setdefault(layer, {})[factor.side] = of_factor
    return owners


def divide(layers: Iterable[LayerCurvature], processes: Processes) -> OwnersOf:
    """Divide the curvature of layers among the processes, and return the owners of its blocks."""
    # of factors that are in the state, each process keeps its blocks
    owners_of_blocks = owners_of(layers, processes) if processes.count > 1 else {}
    present = [
        (layer, factor, inverse, factor.read(inverse=inverse))
        for layer, owners in owners_of_blocks.items()
        for factor in layer.stored
        if factor.side in owners and factor.layout.keys[0] in layer.state
        for inverse in (False, True)
    ]
    # several layers may be rows of one entry, which all have been read now
    for layer, factor, inverse, _ in present:
        layer.state.pop(factor.layout.keys[inverse], None)
    for layer, factor, inverse, full in present:
        owners = owners_of_blocks[layer][factor.side]
        layout = layout_of(factor.side, layer.kind, layer.weight_view, layer.prefix, owners)
        local = Blocks(layout.local, full.rows.new_zeros(layout.shape))
        for into, part in zip(local.parts, owners.local_parts(full.parts), strict=True):
            into.copy_(part)
        layer.state[layout.keys[inverse]] = local.rows
    return owners_of_blocks


def turns_of_parameters(
    parameters: Iterable[nn.Parameter], bound: Any
) -> list[tuple[frozenset[int], list[Factor]]]:
    """Return in which turns inverses are collected, for some of the parameters (by id) each."""
    shares_of = {
        id(parameter): [share for share in bound.shares(parameter) if share.layer.refreshes]
        for parameter in parameters
    }
    needs = {
        key: [
            factor
            for share in shares
            for factor in share.layer.stored
            if factor.layout.is_partitioned and (share.is_weight or factor.side == "G")
        ]
        for key, shares in shares_of.items()
        if shares
    }
    return list(turns_of(needs.items()))


def turns_of(
    needs: Iterable[tuple[int, Sequence[Factor]]],
) -> Iterator[tuple[frozenset[int], list[Factor]]]:
    """Divide parameters into turns that each need about ``ELEMENTS`` elements of inverses."""
    parameters: list[int] = []
    of_turn: dict[Factor, int] = {}  # the numbers of elements that are sent
    for parameter, factors in needs:
        sizes = {
            f: sum(count * packed_size(size) for count, size in f.layout.cut.blocks)
            for f in factors
        }
        together = of_turn | sizes
        if of_turn and len(together) > len(of_turn) and sum(together.values()) > ELEMENTS:
            yield frozenset(parameters), list(of_turn)
            parameters, together = [], sizes
        parameters.append(parameter)
        of_turn = together
    if parameters:
        yield frozenset(parameters), list(of_turn)
