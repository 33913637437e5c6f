"""Data parallelism: every rank holds the whole model, and each block of a factor is summed and inverted by one rank."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from torch import distributed as dist

from torch_thor.curvature.processes import Bounds, Processes
from torch_thor.distributed.ownership import deal_out, packed_sizes, pads
from torch_thor.distributed.triangles import pack, packed_size, unpack_

# blocks of one dtype and device, each tensor with its bounds
_Alike = list[tuple[Tensor, Sequence[int]]]


class DataParallel(Processes):
    """The processes of a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._group = group
        self._device = device
        self._dtype = dtype
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank (one collective and a host–device synchronisation)."""
        if not numbers:
            return [[] for _ in range(self.count)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        gathered = own.new_empty(self.count * len(own))
        dist.all_gather_into_tensor(gathered, own, group=self._group)
        rows: list[list[float]] = gathered.view(self.count, -1).tolist()
        return rows

    def deal_out(self, parts: Sequence[Tensor], fixed: Sequence[Sequence[int] | None]) -> Bounds:
        """Deal out blocks to ranks by their cost."""
        shapes = tuple((len(part), part.shape[-1]) for part in parts)
        return deal_out(shapes, self.count, tuple(None if known is None else tuple(known) for known in fixed))

    def sum_to_owners_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Sum blocks over all ranks, each at its owner, with one collective for each dtype and device."""
        for alike in _by_dtype_and_device(parts, bounds):
            starts, size, padded = _layout(alike, self.count)
            # zeros, so that the padding of ranks with fewer elements holds no NaN
            flat = alike[0][0].new_zeros(size, dtype=self._dtype)
            for rank, start in enumerate(starts):
                for blocks, piece in _pieces(alike, rank, flat[start:]):
                    pack(blocks, piece)
            if padded:
                own = flat.new_empty(size // self.count)
                dist.reduce_scatter_tensor(own, flat, group=self._group)
            else:
                dist.all_reduce(flat, group=self._group)
                own = flat[starts[self.rank] :]
            for blocks, piece in _pieces(alike, self.rank, own):
                unpack_(blocks, piece)

    def share_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Send all blocks from their owners to all ranks, with one collective for each dtype and device."""
        for alike in _by_dtype_and_device(parts, bounds):
            starts, size, padded = _layout(alike, self.count)
            flat = alike[0][0].new_zeros(size, dtype=self._dtype)
            own = flat.new_zeros(size // self.count) if padded else flat[starts[self.rank] :]
            for blocks, piece in _pieces(alike, self.rank, own):
                pack(blocks, piece)
            if padded:
                dist.all_gather_into_tensor(flat, own, group=self._group)
            else:
                dist.all_reduce(flat, group=self._group)  # to the last bit: all other ranks add zeros
            # a rank's own blocks too: unpacked, they are symmetric to the last bit, as on all other ranks
            for rank, start in enumerate(starts):
                for blocks, piece in _pieces(alike, rank, flat[start:]):
                    unpack_(blocks, piece)

    def share_with_replicas_(self, parts: Sequence[Tensor], replicas: object) -> None:
        """Send blocks from the first rank of a group to the others, with one collective for each dtype and device."""
        group = cast(dist.ProcessGroup, replicas)
        for alike in _by_dtype_and_device(parts, [(0, len(part)) for part in parts]):
            _, size, _ = _layout(alike, 1)
            flat = alike[0][0].new_zeros(size, dtype=self._dtype)
            for blocks, piece in _pieces(alike, 0, flat):
                pack(blocks, piece)
            dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
            for blocks, piece in _pieces(alike, 0, flat):
                unpack_(blocks, piece)


def _by_dtype_and_device(parts: Sequence[Tensor], bounds: Bounds) -> Iterator[_Alike]:
    found: defaultdict[tuple[torch.dtype, torch.device], _Alike] = defaultdict(list)
    for part, of_ranks in zip(parts, bounds, strict=True):
        found[part.dtype, part.device].append((part, of_ranks))
    yield from found.values()


def _layout(alike: _Alike, processes: int) -> tuple[list[int], int, bool]:
    """Return where the piece of each rank starts in a flat tensor, the size of that, and whether pieces are padded."""
    sizes = packed_sizes([(len(part), part.shape[-1]) for part, _ in alike], [bounds for _, bounds in alike])
    if pads(sizes):
        width = max(sizes)
        return [rank * width for rank in range(processes)], processes * width, True
    return [0, *itertools.accumulate(sizes[:-1])], sum(sizes), False


def _pieces(alike: _Alike, rank: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the blocks of a rank from each tensor, and the elements of a flat tensor that are for them."""
    first = 0
    for part, bounds in alike:
        blocks = part[bounds[rank] : bounds[rank + 1]]
        if len(blocks):
            last = first + len(blocks) * packed_size(blocks.shape[-1])
            yield blocks, flat[first:last]
            first = last
