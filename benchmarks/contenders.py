"""The optimizers of scale_free.py, and the settings over which each of them is tuned."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torch_thor import ThorMuon
from torch_thor.training.muon import MuonAdamW

BUDGET = 6  # learning rates an optimizer and task

# The smallest learning rate of each grid; each next is twice the last. SGD's scale hangs on the task's loss and batch.
_SGD_START = {"autoencoder": 0.0005, "language": 0.0125, "classifier": 0.025}
_LARGE_BATCH_START = {"sgd": 0.05, "muon": 0.01, "soap": 0.002}  # twice those of the classifier with batches of 128
_START = {"adamw": 0.001, "muon": 0.005, "soap": 0.001}

PEERS = ("sgd", "adamw", "muon", "soap")
USUAL_MOMENTUM = {"sgd": 0.9, "adamw": 0.9, "muon": 0.95, "soap": 0.95}
# A second momentum for every peer (AdamW's and SOAP's first beta).
SECOND_MOMENTUM = 0.8
# What Muon leaves to AdamW has this share of Muon's lr; 1 is tried first.
ADAMW_SHARES = (0.25, 4.0)

# ThorMuon (`thor` in the raw data) has one setting for all tasks, its defaults; only its learning rate is looked at.
THOR_LRS = (0.02, 0.04, 0.06, 0.08, 0.12)
NO_CURVATURE = 1e6  # this damping leaves a multiple of the identity of A


@dataclass(frozen=True)
class Setting:
    """An optimizer with its settings.

    Args:
        optimizer: one of ``PEERS``, or ``"thor"``: ThorMuon.
        lr: learning rate.
        momentum: None for the usual one.
        adamw_share: of Muon: AdamW's learning rate as a share of lr.
        damping: of ThorMuon; None for its default.
    """

    optimizer: str
    lr: float
    momentum: float | None = None
    adamw_share: float | None = None
    damping: float | None = None

    def __str__(self) -> str:
        words = [self.optimizer, f"lr{self.lr:g}"]
        words += [
            f"{word}{value:g}"
            for word, value in (("momentum", self.momentum), ("adamw", self.adamw_share), ("damping", self.damping))
            if value is not None
        ]
        return "-".join(words)

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer."""
        if self.optimizer == "thor":
            damping = {} if self.damping is None else {"damping": self.damping}
            return ThorMuon(model, lr=self.lr, weight_decay=0.01, **damping)
        momentum = USUAL_MOMENTUM[self.optimizer] if self.momentum is None else self.momentum
        if self.optimizer == "muon":
            return _muon(model, self.lr, momentum, self.adamw_share or 1.0)
        return _MAKERS[self.optimizer](model, self.lr, momentum)


def grid(optimizer: str, task: str) -> list[float]:
    """Return the learning rates to try."""
    large_batch = task.startswith("classifier") and task != "classifier"
    if large_batch and optimizer in _LARGE_BATCH_START:
        start = _LARGE_BATCH_START[optimizer]
    else:
        start = _SGD_START[task] if optimizer == "sgd" else _START[optimizer]
    return [start * 2**i for i in range(BUDGET)]


def _muon(model: nn.Module, lr: float, momentum: float, adamw_share: float) -> torch.optim.Optimizer:
    return MuonAdamW(model.parameters(), lr=lr, momentum=momentum, weight_decay=0.01, adamw_lr=lr * adamw_share)


def _soap(model: nn.Module, lr: float, momentum: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP  # the extra `bench`

    return SOAP(model.parameters(), lr=lr, betas=(momentum, 0.95), weight_decay=0.01, precondition_frequency=10)


_MAKERS: dict[str, Callable[[nn.Module, float, float], torch.optim.Optimizer]] = {
    "sgd": lambda model, lr, mu: torch.optim.SGD(model.parameters(), lr=lr, momentum=mu, weight_decay=5e-4),
    "adamw": lambda model, lr, mu: torch.optim.AdamW(model.parameters(), lr=lr, betas=(mu, 0.99), weight_decay=0.01),
    "soap": _soap,
}
