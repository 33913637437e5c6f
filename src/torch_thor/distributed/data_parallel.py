"""The processes that train together: how an optimizer learns of them, and what they exchange.

Every rank holds the whole model, and each block of a factor is summed and inverted by one rank. Of
a symmetric block the lower triangle is sent, which has half as many elements.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from torch_thor.curvature.communication import ALONE, Bounds, Processes
from torch_thor.distributed.collectives import all_gather, reduce_scatter
from torch_thor.distributed.ownership import deal_out, packed_size, packed_sizes, pads

# blocks of one dtype and device, each tensor with its bounds
_Alike = list[tuple[Tensor, Sequence[int]]]


@dataclass(frozen=True)
class Distributed:
    """How an optimizer trains with other processes.

    It is passed as ``THOR(model, distributed=Distributed(divide_curvature=True))``.

    Args:
        process_group: the processes that train the model together and average its gradients, as DDP
            does; their statistics are summed on refresh steps. None: the default group, if
            ``torch.distributed`` is initialised by the time of a step; False: none, so that every
            process trains a model of its own. It must be the same on all processes: those that wait
            for a process that does not come are ended by the timeout of the group.
        divide_curvature: whether only the process that inverts a block keeps it and its inverse (1
            / n of the memory), and every step collects the inverses. By default all processes keep
            all, and ordinary steps send nothing. The steps are the same. State dicts then need
            ``optimizer.consolidate_state_dict()`` first.
        whole_matrices: for ThorMuon under FSDP2, whether one process orthogonalises each matrix as
            a whole (two all-to-all and an all-reduce in every step). By default every process
            orthogonalises its own rows, and nothing is sent.
        communication_dtype: the dtype in which blocks are sent; None: their own. ``torch.bfloat16``
            halves the bytes.

    Raises:
        ValueError: a value is not one of these.
    """

    process_group: Any = None
    divide_curvature: bool = False
    whole_matrices: bool = False
    communication_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        group, flag = self.process_group, "True or False; leave it out for False"
        is_group = (
            group is None
            or group is False
            or (dist.is_available() and isinstance(group, dist.ProcessGroup))
        )
        rules = {
            "process_group": (
                is_group,
                "a torch.distributed.ProcessGroup that this process is in, None for the default "
                "group, or False where every process trains a model of its own; of a DeviceMesh "
                "give mesh.get_group()",
            ),
            "divide_curvature": (isinstance(self.divide_curvature, bool), flag),
            "whole_matrices": (isinstance(self.whole_matrices, bool), flag),
            "communication_dtype": (
                self.communication_dtype in (None, torch.bfloat16, torch.float32),
                "None, torch.bfloat16 or torch.float32; sums of factors overflow in float16",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}: {name} must be {rule}")

    def processes(self, plan: Any) -> Processes:
        """Return the processes that train together at this time.

        ``plan.device`` is the device of the model.
        """
        if self.process_group is False or not (dist.is_available() and dist.is_initialized()):
            return ALONE
        group: Any = dist.group.WORLD if self.process_group is None else self.process_group
        alone = dist.get_world_size(group) == 1
        return ALONE if alone else DataParallel(group, plan.device, self.communication_dtype)


class DataParallel(Processes):
    """The processes of a group."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self._group, self._device, self._dtype = group, device, dtype
        self.count, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank (one collective and a host–device synchronisation)."""
        if not numbers:
            return [[] for _ in range(self.count)]
        # not every device has float64
        own = torch.tensor(_as_integers(numbers), dtype=torch.int64, device=self._device)
        gathered = own.new_empty(self.count * len(own))
        all_gather(gathered, own, self._group)
        return [_as_floats(row) for row in gathered.view(self.count, -1).tolist()]

    def deal_out(self, parts: Sequence[Tensor], fixed: Sequence[Sequence[int] | None]) -> Bounds:
        """Deal out blocks to ranks by their cost."""
        shapes = tuple((len(part), part.shape[-1]) for part in parts)
        return deal_out(
            shapes, self.count, tuple(None if known is None else tuple(known) for known in fixed)
        )

    def sum_to_owners_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Sum blocks over all ranks, each at its owner, in one collective per dtype and device."""
        for alike, flat, pieces, padded in self._flattened(parts, bounds):
            for rank, piece in enumerate(pieces):
                _each(pack, alike, rank, piece)
            own = pieces[self.rank]
            if padded:
                own = torch.empty_like(own)
                reduce_scatter(own, flat, self._group)
            else:
                dist.all_reduce(flat, group=self._group)
            _each(unpack_, alike, self.rank, own)

    def share_(self, parts: Sequence[Tensor], bounds: Bounds) -> None:
        """Send all blocks from owners to all ranks, in one collective per dtype and device."""
        for alike, flat, pieces, padded in self._flattened(parts, bounds):
            own = torch.zeros_like(pieces[self.rank]) if padded else pieces[self.rank]
            _each(pack, alike, self.rank, own)
            if padded:
                all_gather(flat, own, self._group)
            else:
                # to the last bit: all other ranks add zeros
                dist.all_reduce(flat, group=self._group)
            # a rank's own blocks too: unpacked, they are symmetric to the last bit, as on all other
            # ranks
            for rank, piece in enumerate(pieces):
                _each(unpack_, alike, rank, piece)

    def share_with_replicas_(self, parts: Sequence[Tensor], replicas: object) -> None:
        """Send blocks from the first rank of a group to the others.

        One collective is used for each dtype and device.
        """
        group = cast(dist.ProcessGroup, replicas)
        for alike, flat, _, _ in self._flattened(parts, [(0, len(part)) for part in parts]):
            _each(pack, alike, 0, flat)
            dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
            _each(unpack_, alike, 0, flat)

    def _flattened(
        self, parts: Sequence[Tensor], bounds: Bounds
    ) -> Iterator[tuple[_Alike, Tensor, Sequence[Tensor], bool]]:
        """Yield blocks of one dtype and device, a tensor for all, and its pieces by owner."""
        # Whether the pieces are padded is yielded too.
        found: defaultdict[tuple[torch.dtype, torch.device], _Alike] = defaultdict(list)
        for part, of_ranks in zip(parts, bounds, strict=True):
            found[part.dtype, part.device].append((part, of_ranks))
        for alike in found.values():
            sizes = packed_sizes(
                [(len(part), part.shape[-1]) for part, _ in alike], [of for _, of in alike]
            )
            padded = pads(sizes)
            sizes = [max(sizes)] * len(sizes) if padded else sizes
            # so that the padding holds no NaN
            flat = alike[0][0].new_zeros(sum(sizes), dtype=self._dtype)
            yield alike, flat, flat.split(sizes), padded


def _as_integers(numbers: Sequence[float]) -> list[int]:
    """Return the bits of numbers in float64 as integers."""
    return array("q", array("d", numbers).tobytes()).tolist()


def _as_floats(bits: Sequence[int]) -> list[float]:
    """Return the numbers in float64 that have these bits."""
    return array("d", array("q", bits).tobytes()).tolist()


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
