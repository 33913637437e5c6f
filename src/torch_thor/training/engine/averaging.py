"""An exponential moving average of the weights, evaluated in their place (Polyak and Juditsky 1992)."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Begin an average.

    Args:
        model: The network, on its device; `update_parameters(model)` after each step takes its weights in.
        decay: Share of the old average that is kept a step; `None` averages nothing.

    Returns:
        The average, of parameters and of buffers such as BatchNorm's running averages. To be made before the optimizer:
        a copy of the network would keep the hooks that THOR puts on it.
    """
    if decay is None:
        return None
    with torch.random.fork_rng():  # some modules draw random numbers when they are copied
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
