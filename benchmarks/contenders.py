"""The optimizers of scale_free.py, and the learning rates that each is tuned over."""

from collections.abc import Callable

import torch
from torch import nn

from torch_thor import THOR
from torch_thor.training.muon import MuonAdamW

BUDGET = 6  # learning rates an optimizer and task

# The smallest learning rate of each grid; each next is twice the last. SGD's scale hangs on the task's loss.
START: dict[str, float | dict[str, float]] = {
    "sgd": {"classifier": 0.025, "autoencoder": 0.0005, "language": 0.0125},
    "adamw": 0.001,
    "muon": 0.005,
    "soap": 0.001,
}
# A second momentum for every peer (AdamW's and SOAP's first beta), at the best learning rate and at twice that.
LOW_MOMENTUM = 0.8
# Scale-free THOR has one grid for all tasks; its damping is 0.1 but for the heat map, where 1000 is the step without
# curvature: roots that are multiples of the identity.
THOR_MOMENTUM = 0.8
THOR_LRS = [0.005, 0.01, 0.02, 0.04, 0.08, 0.16]
THOR_DAMPING = 0.1
THOR_DAMPINGS = [0.001, THOR_DAMPING, 1000.0]
HEAT_LRS = [0.08, 0.04, 0.02, 0.16]  # in the order in which they are run


def grid(optimizer: str, task: str) -> list[float]:
    """Return the learning rates to try.

    Args:
        optimizer: key of ``CONTENDERS``.
        task: key of ``tasks.TASKS``.

    Returns:
        Six numbers, rising.
    """
    start = START[optimizer]
    smallest = start[task] if isinstance(start, dict) else start
    return [smallest * 2**i for i in range(BUDGET)]


def _soap(model: nn.Module, lr: float, momentum: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP  # the extra `bench`

    return SOAP(model.parameters(), lr=lr, betas=(momentum, 0.95), weight_decay=0.01, precondition_frequency=10)


CONTENDERS: dict[str, Callable[[nn.Module, float, float], torch.optim.Optimizer]] = {
    "sgd": lambda model, lr, mu: torch.optim.SGD(model.parameters(), lr=lr, momentum=mu, weight_decay=5e-4),
    "adamw": lambda model, lr, mu: torch.optim.AdamW(model.parameters(), lr=lr, betas=(mu, 0.99), weight_decay=0.01),
    "muon": lambda model, lr, mu: MuonAdamW(model.parameters(), lr=lr, momentum=mu, weight_decay=0.01),
    "soap": _soap,
}
PEERS = ("sgd", "adamw", "muon", "soap")
USUAL_MOMENTUM = {"sgd": 0.9, "adamw": 0.9, "muon": 0.95, "soap": 0.95}


def make(
    optimizer: str, model: nn.Module, lr: float, damping: float | None, momentum: float | None = None
) -> torch.optim.Optimizer:
    """Make an optimizer for a model.

    Args:
        optimizer: key of ``CONTENDERS``; not used for THOR.
        model: the network.
        lr: learning rate.
        damping: THOR's; None for the others.
        momentum: None for the usual one.

    Returns:
        The optimizer.
    """
    if damping is not None:
        return THOR(model, lr=lr, damping=damping, momentum=momentum, weight_decay=0.01, scaling="spectral")
    return CONTENDERS[optimizer](model, lr, USUAL_MOMENTUM[optimizer] if momentum is None else momentum)
