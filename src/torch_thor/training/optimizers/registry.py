"""The optimizers that a recipe can name: for each one its settings and how it is built.

A new one is its settings, read off its signature, a function that builds it, and one line in `OPTIMIZERS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_thor.optim import AGCSGD, LAMB, THOR
from torch_thor.training.errors import UserError, require
from torch_thor.training.optimizers.muon import MuonAdamW
from torch_thor.training.optimizers.settings import OptimizerSettings, settings_dict, settings_of
from torch_thor.training.optimizers.thor import SpectralSettings, THORSettings, interval_of, thresholds_of

# torch's default, 0.001 without momentum, does not train an image classifier
SGD_DEFAULTS = {"lr": 0.1, "momentum": 0.9}


def _check_sgd(settings: Any) -> None:
    require(
        settings.momentum > 0 or not settings.nesterov,
        f"momentum={settings.momentum} must be above 0 for Nesterov's; nesterov=false is plain SGD",
    )


def _check_nesterov(settings: Any) -> None:
    require(settings.momentum > 0, f"momentum={settings.momentum} must be above 0: without it, use optimizer=sgd")


_here = partial(settings_of, module=__name__)
_sgd = partial(_here, optimizer=torch.optim.SGD, defaults=SGD_DEFAULTS)
SGDSettings = _sgd("SGDSettings", without=("dampening",), check=_check_sgd)
MomentumSettings = _sgd("MomentumSettings", without=("dampening", "nesterov"))
NesterovSettings = _sgd("NesterovSettings", without=("dampening", "nesterov"), check=_check_nesterov)
AdagradSettings = _here("AdagradSettings", torch.optim.Adagrad)
RMSpropSettings = _here("RMSpropSettings", torch.optim.RMSprop)
AdadeltaSettings = _here("AdadeltaSettings", torch.optim.Adadelta)
AdamSettings = _here("AdamSettings", torch.optim.Adam)
AdamWSettings = _here("AdamWSettings", torch.optim.AdamW)
MuonSettings = _here("MuonSettings", MuonAdamW, without=("nesterov",), defaults={"weight_decay": 0.01})
LAMBSettings = _here("LAMBSettings", LAMB, defaults={"lr": 0.01})
AGCSGDSettings = _here("AGCSGDSettings", AGCSGD, rules=("momentum",), check=_check_sgd, defaults=SGD_DEFAULTS)


def _of_parameters(
    kind: Callable[..., torch.optim.Optimizer], model: nn.Module, settings: Any, **fixed: Any
) -> torch.optim.Optimizer:
    return kind(model.parameters(), **settings_dict(settings), **fixed)


def _of_model(kind: Callable[..., torch.optim.Optimizer], model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    return kind(model, **settings_dict(settings))


def _thor(model: nn.Module, settings: Any, scaling: str | None = None) -> torch.optim.Optimizer:
    options = {**settings_dict(settings), "scaling": scaling}
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
    "sgd": Entry(SGDSettings, partial(_of_parameters, torch.optim.SGD)),
    "momentum": Entry(MomentumSettings, partial(_of_parameters, torch.optim.SGD)),
    "nesterov": Entry(NesterovSettings, partial(_of_parameters, torch.optim.SGD, nesterov=True)),
    "adagrad": Entry(AdagradSettings, partial(_of_parameters, torch.optim.Adagrad)),
    "rmsprop": Entry(RMSpropSettings, partial(_of_parameters, torch.optim.RMSprop)),
    "adadelta": Entry(AdadeltaSettings, partial(_of_parameters, torch.optim.Adadelta)),
    "adam": Entry(AdamSettings, partial(_of_parameters, torch.optim.Adam)),
    "adamw": Entry(AdamWSettings, partial(_of_parameters, torch.optim.AdamW)),
    "muon": Entry(MuonSettings, partial(_of_model, MuonAdamW)),
    "lamb": Entry(LAMBSettings, partial(_of_model, LAMB)),
    "agc-sgd": Entry(AGCSGDSettings, partial(_of_model, AGCSGD)),
}


def default_settings() -> dict[str, OptimizerSettings]:
    """Return the settings of every optimizer, untuned.

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
    require(name in OPTIMIZERS, f"optimizer={name} is not an optimizer: use one of {', '.join(OPTIMIZERS)}")
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
