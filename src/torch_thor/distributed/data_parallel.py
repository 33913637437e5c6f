"""Ranks that hold the whole model each: what one has of a step is added to what the others have."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch import distributed as dist

from torch_thor.curvature.inverse import Inverse
from torch_thor.curvature.processes import Damped


class DataParallel:
    """A process group as :class:`torch_thor.curvature.processes.Processes`; every rank inverts every factor.

    Sharing the inverses out among the ranks would be another class with another :meth:`invert`.

    Args:
        group: the process group.
        device: where the model is, and so what the group's backend can send.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.first = self.rank == 0

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, in their order (one collective, and a host–device synchronisation).

        Args:
            numbers: as many on each rank.

        Returns:
            One list per rank.
        """
        if not numbers:
            return [[] for _ in range(self.count)]
        ours = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        everyone = ours.new_empty(self.count * len(ours))
        dist.all_gather_into_tensor(everyone, ours, group=self._group)
        rows: list[list[float]] = everyone.view(self.count, -1).tolist()
        return rows

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Put into every tensor the sum over all ranks: one collective for each dtype and device.

        Args:
            tensors: of the same shapes on each rank.
        """
        alike: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            alike[tensor.dtype, tensor.device].append(tensor)
        for batch in alike.values():
            flat = torch.cat([t.reshape(-1) for t in batch])
            dist.all_reduce(flat, group=self._group)
            # copied back: a view would keep the sums of all layers alive as long as one layer keeps its own
            for tensor, piece in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                tensor.copy_(piece.view_as(tensor))

    def invert(self, factors: Damped, solve: Callable[[Damped], list[Inverse]]) -> list[Inverse]:
        """Solve every factor on every rank; what fails on one, fails on all.

        Like hardware gives like bits. On unlike hardware a factorisation at the edge may fail on some ranks only, and
        they must not come to differ in which layers are due.

        Args:
            factors: pairs of a factor and its damping.
            solve: what to do with them.

        Returns:
            One result per factor.
        """
        results = solve(factors)
        failed = [max(flags) for flags in zip(*self.gather([r.failed for r in results]), strict=True)]
        return [replace(r, failed=bool(flag)) for r, flag in zip(results, failed, strict=True)]
