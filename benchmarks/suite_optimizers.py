"""The optimizers of the suite, and the settings over which each of them is tuned."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import filter as matching
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_thor import THOR, ThorMuon
from torch_thor.training.muon import MuonAdamW

Make = Callable[..., torch.optim.Optimizer]
# learning rates that each optimizer is tried with, a factor of two apart; more if the best is an
# end
FEWEST_RATES = 6


@dataclass(frozen=True)
class Contender:
    """An optimizer.

    Args:
        lr: The middle of the three learning rates that are tried first.
        others: What is tried with the best learning rate: arguments of `make`; `factor` multiplies
            the learning rate.
        make: Makes the optimizer of a model from its learning rate and such arguments.
    """

    lr: float
    others: tuple[dict[str, float], ...]
    make: Make


def _momentum(value: float) -> tuple[dict[str, float], ...]:
    return {"momentum": value}, {"momentum": value, "factor": 2.0}


def _sgd(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=5e-4)


def _adamw(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(momentum, 0.99), weight_decay=0.01)


def _muon(
    model: nn.Module, lr: float, momentum: float = 0.95, adamw_share: float = 1.0
) -> torch.optim.Optimizer:
    # AdamW trains embeddings, biases and normalisation, as Muon's author recommends
    return MuonAdamW(
        model,
        lr=lr,
        momentum=momentum,
        adamw_lr=lr * adamw_share,
        weight_decay=0.01,
        adamw_embeddings=True,
    )


def _soap(model: nn.Module, lr: float, momentum: float = 0.95) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP  # the extra `bench`

    # the side of a vocabulary is left out, as by its authors
    rest: dict[str, Any] = {"weight_decay": 0.01, "precondition_frequency": 10}
    rest["max_precondition_dim"] = 2000
    return SOAP(model.parameters(), lr=lr, betas=(momentum, 0.95), **rest)


def _kron(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    from pytorch_optimizer import Kron

    return Kron(
        model.parameters(), lr=lr, momentum=momentum, weight_decay=0.01, max_size_triangular=2000
    )


def _schedule_free(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    from pytorch_optimizer import ScheduleFreeAdamW

    return ScheduleFreeAdamW(model.parameters(), lr=lr, betas=(momentum, 0.99), weight_decay=0.01)


def as_one_matrix(model: nn.Module) -> dict[str, int]:
    """Return the ``row_splits`` of the results: query, key and value were one matrix in all."""
    names = [name for name, _ in model.named_modules()]
    return {pattern: 1 for pattern in ("*.qkv", "*.c_attn") if matching(names, pattern)}


def _thor_muon(model: nn.Module, lr: float, momentum: float = 0.8) -> torch.optim.Optimizer:
    rest: dict[str, Any] = {"weight_decay": 0.01, "row_splits": as_one_matrix(model)}
    return ThorMuon(model, lr=lr, momentum=momentum, **rest)


def _paper(model: nn.Module, lr: float, damping: float = 0.03) -> torch.optim.Optimizer:
    return THOR(model, lr=lr, weight_decay=5e-4, **THOR.preset("paper"), damping=damping)


PEERS = {
    "sgd": Contender(0.1, _momentum(0.8), _sgd),
    "adamw": Contender(0.004, _momentum(0.8), _adamw),
    "muon": Contender(0.02, (*_momentum(0.8), {"adamw_share": 0.25}, {"adamw_share": 4.0}), _muon),
    "soap": Contender(0.004, _momentum(0.8), _soap),
    "kron": Contender(0.002, _momentum(0.8), _kron),
    "schedule-free": Contender(0.004, _momentum(0.98), _schedule_free),
}
OURS = {
    "thor-muon": Contender(0.08, _momentum(0.9), _thor_muon),
    "thor": Contender(0.1, _momentum(0.8), partial(THOR, weight_decay=5e-4)),
    "thor-paper": Contender(0.05, ({"damping": 0.1}, {"damping": 0.3}), _paper),
}
CLASSES = {"thor-muon": "ThorMuon", "thor": "THOR", "thor-paper": "THOR"}  # of ours
CONTENDERS = {**PEERS, **OURS}
ONE = {"optimizer": "thor-muon", "lr": 0.08}  # ThorMuon's setting for all problems


def make(model: nn.Module, job: dict[str, Any]) -> torch.optim.Optimizer:
    """Make the optimizer of a job, whose keys beside its own are arguments of the optimizer."""
    own = {key: value for key, value in job.items() if key not in {"task", "optimizer", "seed"}}
    return CONTENDERS[job["optimizer"]].make(model, **own)
