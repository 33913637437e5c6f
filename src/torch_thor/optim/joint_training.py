"""The processes that train a model together with the one that has an optimizer."""

from typing import Any

import torch

from torch_thor.curvature.processes import Processes
from torch_thor.distributed.process_group import ProcessGroupHandle
from torch_thor.distributed.sharded_parameters import check_shards_fit
from torch_thor.optim.layer_registry import LayerRegistry


class JointTraining(torch.optim.Optimizer):
    """The part of THOR that knows the processes that train together."""

    _registry: LayerRegistry
    _group_handle: ProcessGroupHandle
    communication_dtype: torch.dtype | None

    @property
    def process_group(self) -> Any:
        """The processes that train this model together: a group, None for the default group, or False for none."""
        return self._group_handle.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        handle = ProcessGroupHandle(group, self.communication_dtype)
        if hasattr(self, "_registry"):
            check_shards_fit(self._registry.index.divided(), group)
            if any(layer.stored.owners for layer in self._registry.layers.values()):
                raise RuntimeError(
                    f"process_group={group!r}: the curvature is divided among the processes of the present group "
                    f"(divide_curvature=True); save the optimizer's state, and load it into one with the other group"
                )
        self._group_handle = handle

    def _processes(self) -> Processes:
        return self._group_handle.processes(self._registry.device)
