"""What a refresh sends: the collectives that it starts, and their bytes, computed without starting any."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.distributed.consistency import HEADER, NUMBERS
from torch_thor.distributed.ownership import Shape, deal_out, packed_sizes, pads

_NUMBER = 8  # bytes of a number that is gathered: float64


@dataclass(frozen=True)
class Collective:
    """One collective of a refresh.

    Args:
        name: its name in ``torch.distributed``.
        given: the bytes of the tensor that each rank passes.
        received: the bytes of the tensor that each rank receives.
    """

    name: str
    given: int
    received: int

    def sent(self, processes: int) -> int:
        """Return the bytes that each rank sends in a ring.

        Args:
            processes: the number of ranks.

        Returns:
            All pieces but one, each as large as the smaller tensor; twice that for an all-reduce.
        """
        if self.name == "all_reduce":
            return 2 * self.given * (processes - 1) // processes
        return max(self.given, self.received) - min(self.given, self.received)


def blocks_of(layers: Iterable[LayerCurvature]) -> list[tuple[torch.dtype, Shape]]:
    """Return the blocks of all factors.

    Args:
        layers: the layers.

    Returns:
        For each tensor of blocks its dtype, the number of blocks and their size.
    """
    found: list[tuple[torch.dtype, Shape]] = []
    for layer in layers:
        for layout in layer.layouts().values():
            for shape in layout.shapes:
                if shape is not None:
                    found.append((factor_dtype(layer.weight.dtype), shape[:2]))
    return found


def collectives_of_refresh(layers: Iterable[LayerCurvature], processes: int) -> list[Collective]:
    """Return the collectives of a refresh in which all layers take new factors.

    The first refresh of a training may start one more, to find out whether the loss is a sum.

    Args:
        layers: the layers that are due, on one device.
        processes: the number of ranks, at least 2.

    Returns:
        The collectives, in their order.
    """
    layers = list(layers)
    counts = sum(3 + len(layer.statistics.group_rows) for layer in layers)
    traces = sum(2 * len(layer.sides) * layer.kind.groups for layer in layers)
    blocks = blocks_of(layers)
    bounds = deal_out(tuple(shape for _, shape in blocks), processes)
    alike: defaultdict[torch.dtype, list[tuple[Shape, Sequence[int]]]] = defaultdict(list)
    for (dtype, shape), of_ranks in zip(blocks, bounds, strict=True):
        alike[dtype].append((shape, of_ranks))
    sums, results = [], []
    for dtype, of_dtype in alike.items():
        sizes = packed_sizes(*zip(*of_dtype, strict=True))
        if pads(sizes):
            piece = max(sizes) * dtype.itemsize
            sums.append(Collective("reduce_scatter_tensor", processes * piece, piece))
            results.append(Collective("all_gather_into_tensor", 2 * piece, 2 * processes * piece))
        else:
            whole = sum(sizes) * dtype.itemsize
            sums.append(Collective("all_reduce", whole, whole))
            results.append(Collective("all_reduce", 2 * whole, 2 * whole))
    before = [_gather(count, processes) for count in (HEADER + NUMBERS, counts, traces)]
    return [*before, *sums, _gather(2 * len(blocks), processes), *results]


def _gather(numbers: int, processes: int) -> Collective:
    return Collective("all_gather_into_tensor", _NUMBER * numbers, processes * _NUMBER * numbers)
