"""Curvature that is divided among the processes (``divide_curvature=True``): each block has one owner.

The owner of a block, which is the process that inverts it, is the only one that keeps it and its inverse. So n
processes need about 1 / n of the memory each, and a refresh sends the sums of the factors alone. In return every step
collects the inverses, one group of layers after the other, and drops them when it has used them. That sends less than
the weights have elements, because only the triangles of blocks are sent. KAISA (Pauloski et al., SC 2021) has the same
choice between memory and communication for whole layers.

The factor of the rows of a sharded weight (FSDP2) is divided with the rows already. Then only the other factor has
owners. The factors of grouped convolutions and experts stay on all processes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.factor import Factor, collected
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import Processes
from torch_thor.curvature.shards import Owners
from torch_thor.distributed.ownership import deal_out
from torch_thor.distributed.triangles import packed_size

# The inverses that are collected at once have about so many elements: 32 MB in float32.
ELEMENTS = 2**23


def owners_of(layers: Iterable[LayerCurvature], processes: int, rank: int) -> dict[Factor, Owners]:
    """Deal out the blocks of all factors that are not divided with the rows of a weight."""
    factors = [factor for layer in layers for factor in layer.stored]
    shapes = [block for factor in factors for block in factor.cut.blocks]
    fixed: list[tuple[int, ...] | None] = []
    for factor in factors:
        fixed += [None] * len(factor.cut.blocks) if factor.owners is None else list(factor.owners.bounds)
    dealt = iter(deal_out(tuple(shapes), processes, tuple(fixed)))
    found = {}
    for factor in factors:
        bounds = tuple(tuple(next(dealt)) for _ in factor.cut.blocks)
        if factor.owners is None and factor.cut.groups == 1:
            found[factor] = Owners(bounds, rank)
    return found


def divide(layers: Sequence[LayerCurvature], processes: Processes) -> None:
    """Divide the curvature of all layers among the processes. Of factors that are in the state, the own blocks stay."""
    new = [layer for layer in layers if all(factor.divided is None for factor in layer.stored)]
    if processes.count == 1 or not new:
        return
    owners = owners_of(new, processes.count, processes.rank)
    present, taken = [], []
    for layer in new:
        for factor in layer.stored:
            if factor in owners and factor.key(False) in layer.state:
                present += [(layer, factor.key(inverse)) for inverse in (False, True)]
                for inverse in (False, True):
                    whole = factor.read(inverse=inverse)
                    parts = [part[owners[factor].held(i)].clone() for i, part in enumerate(whole.parts)]
                    taken.append((layer, factor, inverse, whole.rows, parts))
    for layer, key in present:  # several layers may be rows of one entry, which all have been read now
        layer.state.pop(key, None)
    for factor, of_factor in owners.items():
        factor.divided, factor.exchange = of_factor, processes
    for layer, factor, inverse, rows, parts in taken:
        own = Blocks.zeros(factor.held, rows.dtype, rows.device)
        for into, part in zip(own.parts, [part for part in parts if len(part)], strict=True):
            into.copy_(part)
        layer.state[factor.key(inverse)] = own.rows


# the turns of an update if all inverses are on all processes
ALL_AT_ONCE: tuple[None, ...] = (None,)


class DividedInverses:
    """Collects the inverses of the layers for an update."""

    def turns(self, group: Mapping[str, Any], plan: Any) -> Iterator[frozenset[int]]:
        """Collect the inverses of a group, for some parameters (by id) at a time; all processes consume it."""
        needs: list[tuple[int, list[Factor]]] = []
        for parameter in group["params"]:
            shares = [share for share in plan.shares(parameter) if share.layer.refreshes]
            if shares:
                of_shares = [(share, factor) for share in shares for factor in share.layer.stored if factor.divided]
                needs.append((id(parameter), [f for share, f in of_shares if share.is_weight or f.side == "G"]))
        for parameters, factors in turns_of(needs):
            for factor, whole in zip(factors, collected(factors, inverse=True), strict=True):
                factor.whole = whole
            try:
                yield parameters
            finally:
                for factor in factors:
                    factor.whole = None


def turns_of(needs: Iterable[tuple[int, Sequence[Factor]]]) -> Iterator[tuple[frozenset[int], list[Factor]]]:
    """Divide parameters into turns, each with about ``ELEMENTS`` elements of inverses that it needs."""
    parameters: list[int] = []
    of_turn: dict[Factor, None] = {}
    size = 0
    for parameter, factors in needs:
        new = sum(elements_of(factor) for factor in factors if factor not in of_turn)
        if size and new and size + new > ELEMENTS:
            yield frozenset(parameters), list(of_turn)
            parameters, of_turn, size = [], {}, 0
            new = sum(elements_of(factor) for factor in factors)
        parameters.append(parameter)
        of_turn.update(dict.fromkeys(factors))
        size += new
    if parameters:
        yield frozenset(parameters), list(of_turn)


def elements_of(factor: Factor) -> int:
    """Return the number of elements that a factor has when it is sent."""
    return sum(count * packed_size(size) for count, size in factor.cut.blocks)
