"""The processes that an optimizer trains with, from its argument ``process_group``."""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from torch_thor.curvature.processes import ALONE, Processes
from torch_thor.distributed.announcement import announce
from torch_thor.distributed.data_parallel import DataParallel

_LOST = "lost"  # replaces a group when it is pickled


class ProcessGroupHandle:
    """A handle on a process group, which can be copied and pickled."""

    def __init__(self, group: Any = None, dtype: torch.dtype | None = None) -> None:
        self.is_lost = isinstance(group, str) and group == _LOST
        if not (group is None or group is False or self.is_lost or _is_group(group)):
            raise ValueError(
                f"process_group={group!r}: must be a torch.distributed.ProcessGroup that this process is in, None for "
                f"the default group, or False where every process trains a model of its own; of a DeviceMesh give "
                f"mesh.get_group()"
            )
        self.group = group
        self.dtype = dtype
        self._announced = False

    def join(self, model: nn.Module, device: torch.device) -> Processes:
        """Return the processes that take a step together; the first call checks that they have the same group."""
        if not (self._announced or self.is_lost) and _is_initialized() and dist.get_world_size() > 1:
            announce(self.group, model)
            self._announced = True
        return self.processes(device)

    def processes(self, device: torch.device) -> Processes:
        """Return the processes that train together at this time."""
        if self.is_lost:
            raise RuntimeError(
                "this optimizer had a process group when it was pickled, and groups cannot be; set "
                "optimizer.process_group to a group, to None for the default group, or to False"
            )
        if self.group is False or not _is_initialized():
            return ALONE
        group: Any = dist.group.WORLD if self.group is None else self.group
        return DataParallel(group, device, self.dtype) if dist.get_world_size(group) > 1 else ALONE

    def __deepcopy__(self, _: Any) -> "ProcessGroupHandle":
        return self

    def __reduce__(self) -> tuple[type["ProcessGroupHandle"], tuple[Any, torch.dtype | None]]:
        return ProcessGroupHandle, (_LOST if _is_group(self.group) else self.group, self.dtype)


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_group(value: Any) -> bool:
    return dist.is_available() and isinstance(value, dist.ProcessGroup)
