"""An exponential moving average of the weights, which is evaluated as well (Polyak and Juditsky 1992)."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Create an average of the weights, before the optimizer is built, because a copy would keep the hooks of THOR.

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
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
