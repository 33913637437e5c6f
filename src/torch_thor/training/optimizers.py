"""The optimizers that a recipe can name: for each one its settings and how it is built.

A new one is a frozen dataclass of settings, a function that builds it, and one line in `OPTIMIZERS`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from torch_thor.optim import AGCSGD, LAMB, THOR, intervals
from torch_thor.optim.options import check_interval, check_thresholds
from torch_thor.training.errors import UserError, require
from torch_thor.training.muon import MuonAdamW


@dataclass(frozen=True)
class OptimizerSettings:
    """What every optimizer has.

    Args:
        lr: Learning rate.
        weight_decay: Weight decay, each optimizer's own kind.
    """

    lr: float = 0.1
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(self.lr > 0, f"lr={self.lr} must be above 0")
        require(self.weight_decay >= 0, f"weight_decay={self.weight_decay} must be 0 or more; 0 switches it off")


@dataclass(frozen=True)
class SGDSettings(OptimizerSettings):
    """`torch.optim.SGD`.

    Args:
        momentum: Momentum.
        nesterov: Whether it is Nesterov's.
    """

    momentum: float = 0.9
    nesterov: bool = False


@dataclass(frozen=True)
class AGCSGDSettings(SGDSettings):
    """`AGCSGD`: SGD on adaptively clipped gradients.

    Args:
        clip_factor: The largest ratio of a unit's gradient norm to its weight norm.
        eps: The weight norm that a unit has at least.
    """

    clip_factor: float = 0.01
    eps: float = 1e-3


@dataclass(frozen=True)
class AdamWSettings(OptimizerSettings):
    """`torch.optim.AdamW`.

    Args:
        beta1: Decay of the running mean of the gradient.
        beta2: Decay of the running mean of its square.
    """

    lr: float = 1e-3
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999


@dataclass(frozen=True)
class LAMBSettings(AdamWSettings):
    """`LAMB`, without decay and trust ratio for biases and gains.

    Args:
        eps: Added to the root of the second moment.
    """

    lr: float = 0.01
    eps: float = 1e-6


@dataclass(frozen=True)
class MuonSettings(OptimizerSettings):
    """`MuonAdamW`: torch's Muon for matrices, AdamW for the rest.

    Args:
        momentum: Muon's momentum.
        adjust_lr_fn: Muon's rule for a matrix's step length.
        adamw_lr: AdamW's learning rate; `None` takes `lr`.
    """

    lr: float = 1e-3
    weight_decay: float = 0.01
    momentum: float = 0.95
    adjust_lr_fn: str = "match_rms_adamw"
    adamw_lr: float | None = None


@dataclass(frozen=True)
class THORSettings(OptimizerSettings):
    """`THOR`; the names are its own.

    Args:
        damping: Added to the Fisher matrix.
        momentum: Momentum.
        nesterov: Whether it is Nesterov's.
        update_interval: Steps between refreshes of the curvature: a number, or a mapping with `kind` (`constant`,
            `piecewise`, `geometric`) and the arguments of that class of `torch_thor.intervals`.
        trace_thresholds: (ω1, ω2) of the trace rule, or the name of one of `THOR.preset`'s settings.
        split_dim: Size of the blocks that factors are split into; `None` leaves them whole, `auto` measures.
        factor_decay: Decay of the running average of the factors.
        kl_clip: Limit on the step's length in the Fisher norm; `None` is no limit.
        skip: Layers to leave to SGD with momentum, by name or pattern: `[head, "*norm*"]`.
    """

    lr: float = 0.05
    damping: float = 0.03
    momentum: float = 0.9
    nesterov: bool = False
    update_interval: Any = 100
    trace_thresholds: Any = (0.01, 0.0)
    split_dim: int | str | None = 128
    factor_decay: float = 0.0
    kl_clip: float | None = None
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.trace_thresholds, list):  # as YAML has it
            object.__setattr__(self, "trace_thresholds", tuple(self.trace_thresholds))
        interval_of(self.update_interval)
        thresholds_of(self.trace_thresholds)


@dataclass(frozen=True)
class SpectralSettings(THORSettings):
    """`THOR` with `scaling="spectral"`; `damping` is relative to the factors."""

    lr: float = 0.04
    damping: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    update_interval: Any = 10
    factor_decay: float = 0.5


INTERVALS: dict[str, type[intervals.Constant | intervals.Piecewise | intervals.Geometric]] = {
    "constant": intervals.Constant,
    "piecewise": intervals.Piecewise,
    "geometric": intervals.Geometric,
}


def interval_of(value: Any) -> Any:
    """Build the interval that a recipe describes.

    Args:
        value: A number of steps, or a mapping with `kind` and the arguments of a schedule.

    Returns:
        What `THOR` takes as `update_interval`.

    Raises:
        UserError: If it is neither, or the schedule refuses its arguments.
    """
    if not isinstance(value, dict):
        try:
            return check_interval("update_interval", value)
        except ValueError as error:
            raise UserError(f"{error}; a schedule is a mapping such as {EXAMPLE}") from error
    arguments = {str(key): item for key, item in value.items() if key != "kind"}
    kind = str(value.get("kind"))
    require(
        kind in INTERVALS,
        f"update_interval.kind={kind} is no schedule: use one of {', '.join(INTERVALS)}, as in {EXAMPLE}",
    )
    try:
        return INTERVALS[kind](**arguments)
    except TypeError as error:  # arguments that it does not have, or lacks
        known = ", ".join(item.name for item in fields(INTERVALS[kind]))
        raise UserError(f"update_interval: {kind} takes {known}, not {', '.join(arguments) or 'nothing'}") from error
    except ValueError as error:
        raise UserError(f"update_interval: {error}") from error


EXAMPLE = "{kind: geometric, first: 5, last: 100, factor: 1.5}"


def thresholds_of(value: Any) -> Any:
    """Look up the thresholds that a recipe names.

    Args:
        value: The name of a preset, or the thresholds themselves.

    Returns:
        What `THOR` takes as `trace_thresholds`.

    Raises:
        UserError: If there is no such preset, or they are no pair ω1 ≥ ω2 ≥ 0.
    """
    try:
        return THOR.preset(value)["trace_thresholds"] if isinstance(value, str) else check_thresholds(value)
    except ValueError as error:
        raise UserError(f"trace_thresholds: {error}" if isinstance(value, str) else str(error)) from error


def _sgd(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **asdict(settings))


def _adamw(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(model.parameters(), settings.lr, betas, weight_decay=settings.weight_decay)


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


def _spectral(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    return _thor(model, settings, scaling="spectral")


@dataclass(frozen=True)
class Entry:
    """An optimizer's settings class and builder."""

    settings: type[OptimizerSettings]
    build: Callable[[nn.Module, Any], torch.optim.Optimizer]


OPTIMIZERS: dict[str, Entry] = {
    "thor": Entry(THORSettings, _thor),
    "thor-spectral": Entry(SpectralSettings, _spectral),
    "sgd": Entry(SGDSettings, _sgd),
    "adamw": Entry(AdamWSettings, _adamw),
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
        isinstance(settings, entry.settings),
        f"settings={settings} are not for {name}: pass a {entry.settings.__name__}",
    )
    try:
        return entry.build(model, settings)
    except ValueError as error:
        raise UserError(f"optimizer {name}: {error}") from error
