"""An exponential moving average of the weights, which is evaluated as well (Polyak and Juditsky 1992)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_thor.capture.sharding import is_sharded


def averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Create an average of the weights, before the optimizer is built, because a copy would keep the hooks of THOR.

    If the network is to be divided among processes, the average must be created before, and divided too.

    Args:
        model: The network, on its device.
        decay: Decay of the average per step; `None` creates no average.

    Returns:
        The average of the parameters and of buffers such as BatchNorm's running statistics. Call its method
        `update_parameters(model)` after each step.
    """
    if decay is None:
        return None
    with torch.random.fork_rng():  # some modules draw random numbers when they are copied
        return AveragedModel(model, multi_avg_fn=_OwnParts(decay), use_buffers=True)


class _OwnParts:
    """Updates an average; of parameters that are divided among processes, each process averages its own part.

    Args:
        decay: Decay of the average per step.
    """

    def __init__(self, decay: float) -> None:
        self._update = get_ema_multi_avg_fn(decay)

    def __call__(self, averages: Sequence[Tensor], values: Sequence[Tensor], number: Any) -> None:
        if values[0].is_floating_point():
            self._update([_own(tensor) for tensor in averages], [_own(tensor) for tensor in values], number)
        else:  # such as the positions of tokens, whose average would be rounded to another number
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)


def _own(tensor: Any) -> Any:
    return tensor.to_local() if is_sharded(tensor) else tensor
