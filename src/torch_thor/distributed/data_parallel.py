"""What the processes that train together exchange.

Every rank holds the whole model, and each block of a factor is summed and inverted by one rank. Of
a symmetric block the lower triangle is sent, which has half as many elements.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from torch_thor.curvature.blocks import wide_dtype
from torch_thor.curvature.communication import Among, Bounds, Processes
from torch_thor.distributed.assignment import assign, packed_size, packed_sizes, pads

# by the names that the installed torch has for them: 2.14 warns of the older names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# blocks of one dtype and device, each tensor with its bounds
_Alike = list[tuple[Tensor, Sequence[int]]]


class DataParallel(Processes):
    """The processes of a group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype | None = None,
        mesh: Any = None,
    ) -> None:
        self._group, self._device, self._dtype, self._mesh = group, device, dtype, mesh
        self.count, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def _among(self, among: Among) -> Any:
        """Return the process group of some of the processes."""
        if among == "all":
            return self._group
        assert self._mesh is not None
        return self._mesh.get_group(0 if among == "replicas" else self._mesh.ndim - 1)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank (one collective and a host–device synchronisation)."""
        if not numbers:
            return [[] for _ in range(self.count)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        gathered = own.new_empty(self.count * len(own))
        all_gather(gathered, own, group=self._group)
        rows: list[list[float]] = gathered.view(self.count, -1).tolist()
        return rows

    def assign(self, parts: Sequence[Tensor], fixed: Sequence[Sequence[int] | None]) -> Bounds:
        """Deal out blocks to ranks by their cost."""
        shapes = tuple((len(part), part.shape[-1]) for part in parts)
        return assign(
            shapes, self.count, tuple(None if known is None else tuple(known) for known in fixed)
        )

    def sum_to_owners_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Sum blocks over all ranks, each at its owner, in one collective per dtype and device."""
        for alike, flat, pieces, padded in self._flattened(parts, bounds):
            for rank, piece in enumerate(pieces):
                _each(pack, alike, rank, piece)
            local = pieces[self.rank]
            if padded:
                local = torch.empty_like(local)
                reduce_scatter(local, flat, group=self._group)
            else:
                dist.all_reduce(flat, group=self._group)
            _each(unpack_, alike, self.rank, local)

    def share_(self, parts: Sequence[Tensor], bounds: Bounds, among: Among = "all") -> None:
        """Send all blocks from owners to all ranks, in one collective per dtype and device."""
        group = self._among(among)
        rank = dist.get_rank(group)
        for alike, flat, pieces, padded in self._flattened(parts, bounds):
            local = torch.zeros_like(pieces[rank]) if padded else pieces[rank]
            _each(pack, alike, rank, local)
            owners = [i for i, piece in enumerate(pieces) if len(piece)]
            if padded:
                all_gather(flat, local, group=group)
            elif len(owners) == 1:
                dist.broadcast(flat, dist.get_global_rank(group, owners[0]), group=group)
            else:
                # to the last bit: all other ranks add zeros
                dist.all_reduce(flat, group=group)
            # a rank's own blocks too: unpacked, they are symmetric to the last bit, as on all other
            # ranks
            for rank_of, piece in enumerate(pieces):
                _each(unpack_, alike, rank_of, piece)

    def all_reduce(self, tensor: Tensor, among: Among = "all") -> Tensor:
        """Return the sum of a tensor over processes, in the widest dtype of their device."""
        total = tensor.to(self._device, wide_dtype(self._device), copy=True)
        dist.all_reduce(total, group=self._among(among))
        return total

    def all_to_all(
        self, tensor: Tensor, sent: list[int], received: list[int], among: Among = "all"
    ) -> Tensor:
        """Exchange elements of a vector: as many of each process as ``received`` says."""
        result = torch.empty(sum(received), dtype=tensor.dtype, device=self._device)
        dist.all_to_all_single(
            result, tensor.to(self._device), received, sent, group=self._among(among)
        )
        return result.to(tensor.device)

    def _flattened(
        self, parts: Sequence[Tensor], bounds: Bounds
    ) -> Iterator[tuple[_Alike, Tensor, Sequence[Tensor], bool]]:
        """Yield blocks of one dtype and device, a tensor for all, and its pieces by owner.

        With them, whether the pieces are padded to one size.
        """
        by_place: defaultdict[tuple[torch.dtype, torch.device], _Alike] = defaultdict(list)
        for part, of_ranks in zip(parts, bounds, strict=True):
            by_place[part.dtype, part.device].append((part, of_ranks))
        for alike in by_place.values():
            sizes = packed_sizes(
                [(len(part), part.shape[-1]) for part, _ in alike], [each for _, each in alike]
            )
            padded = pads(sizes)
            sizes = [max(sizes)] * len(sizes) if padded else sizes
            # so that the padding holds no NaN
            flat = alike[0][0].new_zeros(sum(sizes), dtype=self._dtype)
            yield alike, flat, flat.split(sizes), padded


def _each(
    convert: Callable[[Tensor, Tensor], None], alike: _Alike, rank: int, flat: Tensor
) -> None:
    """Pack or unpack a rank's blocks of each tensor, with a flat tensor's elements for them."""
    first = 0
    for part, bounds in alike:
        blocks = part[bounds[rank] : bounds[rank + 1]]
        if len(blocks):
            last = first + len(blocks) * packed_size(blocks.shape[-1])
            convert(blocks, flat[first:last])
            first = last


def pack(blocks: Tensor, into: Tensor) -> None:
    """Write the lower triangles of symmetric blocks into a flat tensor."""
    size = blocks.shape[-1]
    row, column = torch.tril_indices(size, size, device=blocks.device)
    into.view(len(blocks), -1).copy_(blocks.flatten(1).index_select(1, row * size + column))


def unpack_(blocks: Tensor, packed: Tensor) -> None:
    """Overwrite symmetric blocks with those that a flat tensor holds as lower triangles."""
    index = torch.arange(blocks.shape[-1], device=blocks.device)
    row, column = torch.maximum(index[:, None], index), torch.minimum(index[:, None], index)
    places = (row * (row + 1) // 2 + column).flatten()
    blocks.copy_(packed.view(len(blocks), -1).index_select(1, places).view(blocks.shape))
