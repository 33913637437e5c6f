"""How an optimizer trains with other processes, as its user chooses it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist


@dataclass(frozen=True)
class Distributed:
    """How an optimizer trains with other processes.

    It is passed as ``THOR(model, distributed=Distributed(process_group=group))``.

    Args:
        process_group: the processes that train the model together and average its gradients, as DDP
            does; their statistics are summed on refresh steps. None: the default group, if
            ``torch.distributed`` is initialised by the time of a step; False: none, so that every
            process trains a model of its own. It must be the same on all processes, and under FSDP2
            the mesh's own: processes that wait for another that does not come are ended by the
            timeout of the group.
        whole_matrices: for ThorMuon under FSDP2, whether one process orthogonalises each matrix as
            a whole (two all-to-all and an all-reduce in every step). By default every process
            orthogonalises its own rows, and nothing is sent.
        communication_dtype: the dtype in which blocks are sent; None: their own. ``torch.bfloat16``
            halves the bytes.

    Raises:
        ValueError: a value is not listed here.
    """

    process_group: Any = None
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
            "whole_matrices": (isinstance(self.whole_matrices, bool), flag),
            "communication_dtype": (
                self.communication_dtype in (None, torch.bfloat16, torch.float32),
                "None, torch.bfloat16 or torch.float32; sums of factors overflow in float16",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}: {name} must be {rule}")
