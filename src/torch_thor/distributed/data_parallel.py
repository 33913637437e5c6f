"""Data parallelism: every rank holds the whole model, and statistics are summed over ranks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch import distributed as dist

from torch_thor.curvature.inverse import Inverse
from torch_thor.curvature.processes import Damped


class DataParallel:
    """The processes of a group, as a :class:`torch_thor.curvature.processes.Processes`; every rank inverts all factors.

    Args:
        group: the process group.
        device: the device of the model, whose tensors the backend of the group can send.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.first = self.rank == 0

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank (one collective and a host–device synchronisation).

        Args:
            numbers: the numbers of this rank, as many as on the others.

        Returns:
            One list per rank, in the order of ranks.
        """
        if not numbers:
            return [[] for _ in range(self.count)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        gathered = own.new_empty(self.count * len(own))
        dist.all_gather_into_tensor(gathered, own, group=self._group)
        rows: list[list[float]] = gathered.view(self.count, -1).tolist()
        return rows

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over all ranks, with one collective for each dtype and device.

        Args:
            tensors: tensors of the same shapes on every rank; changed in place.
        """
        alike: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            alike[tensor.dtype, tensor.device].append(tensor)
        for batch in alike.values():
            flat = torch.cat([t.reshape(-1) for t in batch])
            dist.all_reduce(flat, group=self._group)
            # copied back, because a view would keep the sums of all layers alive as long as that of one layer
            for tensor, piece in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                tensor.copy_(piece.view_as(tensor))

    def invert(self, factors: Damped, solve: Callable[[Damped], list[Inverse]]) -> list[Inverse]:
        """Invert every factor on every rank; an inversion that fails on one rank counts as failed on all.

        On different hardware, a factor that is nearly indefinite may be inverted on some ranks only. The ranks must
        agree on the result, because the layers that stay due depend on it.

        Args:
            factors: pairs of a factor and its damping.
            solve: inverts them.

        Returns:
            One result per factor.
        """
        results = solve(factors)
        failed = [max(flags) for flags in zip(*self.gather([r.failed for r in results]), strict=True)]
        return [replace(r, failed=bool(flag)) for r, flag in zip(results, failed, strict=True)]
