"""The optimizers that a recipe can name: for each one its settings and how it is built.

A new one is a frozen dataclass of settings, a function that builds it, and one line in `OPTIMIZERS`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_thor.optim import AGCSGD, LAMB, THOR
from torch_thor.training.errors import UserError, require
from torch_thor.training.optimizers.muon import MuonAdamW
from torch_thor.training.optimizers.settings import (
    AdadeltaSettings,
    AdagradSettings,
    AdamSettings,
    AdamWSettings,
    AGCSGDSettings,
    LAMBSettings,
    MomentumSettings,
    MuonSettings,
    NesterovSettings,
    OptimizerSettings,
    RMSpropSettings,
    SGDSettings,
)
from torch_thor.training.optimizers.thor import SpectralSettings, THORSettings, interval_of, thresholds_of


def _torch_own(
    kind: Callable[..., torch.optim.Optimizer], model: nn.Module, settings: Any, **fixed: Any
) -> torch.optim.Optimizer:
    options = asdict(settings)
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    return kind(model.parameters(), **options, **fixed)


def _agc_sgd(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    return AGCSGD(model, **asdict(settings))


def _lamb(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    betas = (settings.beta1, settings.beta2)
    return LAMB(model, settings.lr, betas, settings.eps, settings.weight_decay)


def _muon(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    return MuonAdamW(model.parameters(), **asdict(settings))


def _thor(model: nn.Module, settings: Any, scaling: str | None = None) -> torch.optim.Optimizer:
    options = {**asdict(settings), "scaling": scaling}
    options["update_interval"] = interval_of(settings.update_interval)
    options["trace_thresholds"] = thresholds_of(settings.trace_thresholds)
    options["skip"] = settings.skip or None
    try:
        return THOR(model, **options)
    except ValueError as error:  # a pattern that matches no layer of this network
        raise UserError(str(error)) from error


@dataclass(frozen=True)
class Entry:
    """An optimizer's settings class and builder."""

    settings: type[OptimizerSettings]
    build: Callable[[nn.Module, Any], torch.optim.Optimizer]


OPTIMIZERS: dict[str, Entry] = {
    "thor": Entry(THORSettings, _thor),
    "thor-spectral": Entry(SpectralSettings, partial(_thor, scaling="spectral")),
    "sgd": Entry(SGDSettings, partial(_torch_own, torch.optim.SGD)),
    "momentum": Entry(MomentumSettings, partial(_torch_own, torch.optim.SGD)),
    "nesterov": Entry(NesterovSettings, partial(_torch_own, torch.optim.SGD, nesterov=True)),
    "adagrad": Entry(AdagradSettings, partial(_torch_own, torch.optim.Adagrad)),
    "rmsprop": Entry(RMSpropSettings, partial(_torch_own, torch.optim.RMSprop)),
    "adadelta": Entry(AdadeltaSettings, partial(_torch_own, torch.optim.Adadelta)),
    "adam": Entry(AdamSettings, partial(_torch_own, torch.optim.Adam)),
    "adamw": Entry(AdamWSettings, partial(_torch_own, torch.optim.AdamW)),
    "muon": Entry(MuonSettings, _muon),
    "lamb": Entry(LAMBSettings, _lamb),
    "agc-sgd": Entry(AGCSGDSettings, _agc_sgd),
}


def default_settings() -> dict[str, OptimizerSettings]:
    """The settings of every optimizer, untuned.

    Returns:
        One settings object for each key of `OPTIMIZERS`.
    """
    return {name: entry.settings() for name, entry in OPTIMIZERS.items()}


def build_optimizer(name: str, model: nn.Module, settings: OptimizerSettings | None = None) -> torch.optim.Optimizer:
    """Build an optimizer for all parameters of a model.

    Args:
        name: A key of `OPTIMIZERS`.
        model: The network.
        settings: An object of that optimizer's settings class; `None` takes the defaults.

    Returns:
        The optimizer.

    Raises:
        UserError: If the optimizer refuses its settings, or the model.
    """
    require(name in OPTIMIZERS, f"optimizer={name} is no optimizer: use one of {', '.join(OPTIMIZERS)}")
    entry = OPTIMIZERS[name]
    settings = entry.settings() if settings is None else settings
    require(
        type(settings) is entry.settings,
        f"settings={settings} are not for {name}: pass a {entry.settings.__name__}",
    )
    try:
        return entry.build(model, settings)
    except ValueError as error:
        raise UserError(f"optimizer {name}: {error}") from error
