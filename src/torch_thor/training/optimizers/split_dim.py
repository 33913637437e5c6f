"""`split_dim: auto` of a recipe: the number is measured where a run is built."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_thor.split.choice import choose_split_dim
from torch_thor.training.config.run_config import RunConfig
from torch_thor.training.engine import parallel, sharding
from torch_thor.training.engine.batch_trees import split_batch
from torch_thor.training.errors import UserError, first_line, require
from torch_thor.training.tasks.task import Task

AUTO = "auto"


class _Itself(nn.Module):
    """Returns its network, so that the task computes the loss of the copy that is measured."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> nn.Module:
        return self.model


def with_split_dim(settings: Any, model: nn.Module, task: Task, config: RunConfig, *, resumed: bool) -> Any:
    """Replace `split_dim=auto` by the number that `choose_split_dim` finds on the first batch of the training.

    The first process measures for all. Torch's random generators are left as they were.

    Args:
        settings: The settings of an optimizer.
        model: The network, on the device.
        task: The task.
        config: The settings of the training.
        resumed: Whether a checkpoint will be loaded, which has the number.

    Returns:
        The settings with a number; unchanged if they do not say `auto`.

    Raises:
        UserError: If the parameters are divided among processes, or nothing can be measured.
    """
    if getattr(settings, "split_dim", None) != AUTO:
        return settings
    require(
        not sharding.is_divided(model),
        f"split_dim=auto measures whole factors, and parallel={config.parallel} divides them: give a number, such as "
        "the one that split_dim=auto or `torch-thor split-dim` chooses on one process",
    )
    if resumed:
        return replace(settings, split_dim=type(settings)().split_dim)
    with parallel.agreed():
        number = _measured(model, task, config) if parallel.is_first() else 0
    return replace(settings, split_dim=parallel.gathered(number)[0])


def _measured(model: nn.Module, task: Task, config: RunConfig) -> int:
    with torch.random.fork_rng([]):  # of the CPU, which data may use; choose_split_dim restores that of the device
        batches = task.open_data(parallel.shard()).train.endless()
        batch = split_batch(next(batches), config.accumulation_at(0))[0]
        try:
            return choose_split_dim(_Itself(model), (), loss_fn=lambda net: task.loss(net, batch).mean).split_dim
        except (ValueError, RuntimeError) as error:  # nothing to split, or memory was too small
            raise UserError(f"split_dim=auto: {first_line(error)}; give a number, such as 128") from error
