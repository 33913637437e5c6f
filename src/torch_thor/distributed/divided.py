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
from torch_thor.curvature.shards import Owners
from torch_thor.distributed.assignment import deal_out, packed_size

# The inverses that are collected at once have about so many elements: 32 MB in float32.
ELEMENTS = 2**23


def owners_of(layers: Iterable[LayerCurvature], processes: int, rank: int) -> dict[Factor, Owners]:
    """Deal out the blocks of all factors that are not divided with the rows of a weight."""
    factors = [factor for layer in layers for factor in layer.stored]
    fixed: list[tuple[int, ...] | None] = []
    for factor in factors:
        fixed += [None] * len(factor.cut.blocks) if factor.owners is None else factor.owners.bounds
    shapes = tuple(block for factor in factors for block in factor.cut.blocks)
    dealt = iter(deal_out(shapes, processes, tuple(fixed)))
    bounds = {factor: tuple(tuple(next(dealt)) for _ in factor.cut.blocks) for factor in factors}
    return {f: Owners(bounds[f], rank) for f in factors if f.owners is None and f.cut.groups == 1}


def divide(layers: Sequence[LayerCurvature], processes: Processes) -> None:
    """Divide the curvature of all layers among the processes.

    Of factors that are in the state, the own blocks stay.
    """
    new = [layer for layer in layers if all(factor.divided is None for factor in layer.stored)]
    if processes.count == 1 or not new:
        return
    owners = owners_of(new, processes.count, processes.rank)
    present: list[tuple[LayerCurvature, Factor, bool, Blocks]] = []
    for layer in new:
        for factor in layer.stored:
            if factor in owners and factor.keys[0] in layer.state:
                present += [
                    (layer, factor, inverse, factor.read(inverse=inverse))
                    for inverse in (False, True)
                ]
    # several layers may be rows of one entry, which all have been read now
    for layer, factor, inverse, _ in present:
        layer.state.pop(factor.keys[inverse], None)
    for factor, of_factor in owners.items():
        factor.divided, factor.exchange = of_factor, processes
        factor.bind()
    for layer, factor, inverse, whole in present:
        own = Blocks(factor.held, whole.rows.new_zeros(factor.held.rows, factor.held.width))
        held = [part[owners[factor].held(i)] for i, part in enumerate(whole.parts)]
        for into, part in zip(own.parts, [part for part in held if len(part)], strict=True):
            into.copy_(part)
        layer.state[factor.keys[inverse]] = own.rows


def is_divided(layers: Iterable[LayerCurvature]) -> bool:
    """Return whether processes keep parts of the curvature alone."""
    return any(factor.divided for layer in layers for factor in layer.stored)


def turns_of_parameters(
    parameters: Iterable[nn.Parameter], bound: Any
) -> list[tuple[frozenset[int], list[Factor]]]:
    """Return in which turns inverses are collected, for some of the parameters (by id) each."""
    needs: list[tuple[int, list[Factor]]] = []
    for parameter in parameters:
        shares = [share for share in bound.shares(parameter) if share.layer.refreshes]
        if shares:
            of_shares = [
                (share, factor)
                for share in shares
                for factor in share.layer.stored
                if factor.divided
            ]
            needs.append(
                (id(parameter), [f for share, f in of_shares if share.is_weight or f.side == "G"])
            )
    return list(turns_of(needs))


def turns_of(
    needs: Iterable[tuple[int, Sequence[Factor]]],
) -> Iterator[tuple[frozenset[int], list[Factor]]]:
    """Divide parameters into turns that each need about ``ELEMENTS`` elements of inverses."""
    parameters: list[int] = []
    of_turn: dict[Factor, int] = {}  # the numbers of elements that are sent
    for parameter, factors in needs:
        sizes = {f: sum(count * packed_size(size) for count, size in f.cut.blocks) for f in factors}
        together = of_turn | sizes
        if of_turn and len(together) > len(of_turn) and sum(together.values()) > ELEMENTS:
            yield frozenset(parameters), list(of_turn)
            parameters, together = [], sizes
        parameters.append(parameter)
        of_turn = together
    if parameters:
        yield frozenset(parameters), list(of_turn)
