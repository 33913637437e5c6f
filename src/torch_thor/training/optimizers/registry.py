"""The optimizers that a recipe can name: for each one its settings class and the function that builds it.

To add an optimizer, make its settings class from its signature (`settings_of`) and add one line to `OPTIMIZERS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_thor.optim import AGCSGD, LAMB, THOR, ThorMuon
from torch_thor.training.errors import UserError, require
from torch_thor.training.optimizers.muon import MuonAdamW
from torch_thor.training.optimizers.settings import TORCH_MEANINGS, OptimizerSettings, settings_dict, settings_of
from torch_thor.training.optimizers.thor import ThorMuonSettings, THORSettings, build

# torch's defaults (lr 0.001, no momentum) do not train an image classifier
SGD_DEFAULTS = {"lr": 0.1, "momentum": 0.9}
DECOUPLED = "Coefficient of the decoupled weight decay: each step multiplies a weight by 1 - lr · weight_decay."
LAMB_MEANINGS = {
    "lr": "Learning rate, above 0: a step changes a weight by this fraction of its norm.",
    "beta1": TORCH_MEANINGS["beta1"],
    "beta2": TORCH_MEANINGS["beta2"],
    "weight_decay": "λ, added to the update as λ W before the trust ratio is computed.",
    "eps": "ε > 0, added to the square root of the second moment.",
}
AGC_MEANINGS = {
    "lr": "Learning rate of SGD, above 0.",
    "momentum": TORCH_MEANINGS["momentum"],
    "nesterov": TORCH_MEANINGS["nesterov"],
    "weight_decay": "Coefficient of the weight decay, added to the clipped gradient as weight_decay · W.",
    "dampening": "τ in v ← μ v + (1 − τ) d, from the second step on. The first step has v = d, as in torch's SGD.",
    "dampen_first": "Whether the first step is dampened too, v = (1 − τ) d, as in the code of AGC's authors, where the "
    "momentum starts at zero. Dampening may then be combined with Nesterov momentum.",
    "clip_factor": "λ, the largest ratio of gradient norm to weight norm of a unit. The paper's grid at batch size "
    "4096 ends at 0.01; smaller batches can use larger values.",
    "eps": "ε, a lower bound on the weight norm of a unit, so that units initialised to zero can be trained.",
}


def _check_sgd(settings: Any) -> None:
    require(
        settings.momentum > 0 or not settings.nesterov,
        f"momentum={settings.momentum} must be above 0 for Nesterov's momentum; nesterov=false is plain SGD",
    )


def _check_nesterov(settings: Any) -> None:
    require(settings.momentum > 0, f"momentum={settings.momentum} must be above 0: without it, use optimizer=sgd")


_here = partial(settings_of, module=__name__)
_torch = partial(_here, meanings=TORCH_MEANINGS)
_sgd = partial(_torch, optimizer=torch.optim.SGD, defaults=SGD_DEFAULTS)
SGDSettings = _sgd("SGDSettings", without=("dampening",), check=_check_sgd)
MomentumSettings = _sgd(
    "MomentumSettings", without=("dampening", "nesterov"), summary="Settings of `SGD` with momentum."
)
NesterovSettings = _sgd(
    "NesterovSettings",
    without=("dampening", "nesterov"),
    check=_check_nesterov,
    meanings={**TORCH_MEANINGS, "momentum": "Factor of Nesterov's momentum, in (0, 1)."},
    summary="Settings of `SGD` with Nesterov's momentum.",
)
AdagradSettings = _torch("AdagradSettings", torch.optim.Adagrad)
RMSpropSettings = _torch("RMSpropSettings", torch.optim.RMSprop)
AdadeltaSettings = _torch("AdadeltaSettings", torch.optim.Adadelta)
AdamSettings = _torch("AdamSettings", torch.optim.Adam)
AdamWSettings = _here("AdamWSettings", torch.optim.AdamW, meanings={**TORCH_MEANINGS, "weight_decay": DECOUPLED})
MuonSettings = _here(
    "MuonSettings",
    MuonAdamW,
    without=("nesterov",),
    defaults={"weight_decay": 0.01},
    summary="Settings of `Muon`, which trains matrices; `AdamW` trains all other parameters.",
)
LAMBSettings = _here("LAMBSettings", LAMB, defaults={"lr": 0.01}, meanings=LAMB_MEANINGS)
AGCSGDSettings = _here(
    "AGCSGDSettings", AGCSGD, rules=("momentum",), check=_check_sgd, defaults=SGD_DEFAULTS, meanings=AGC_MEANINGS
)


def _of_parameters(
    kind: Callable[..., torch.optim.Optimizer], model: nn.Module, settings: Any, **fixed: Any
) -> torch.optim.Optimizer:
    return kind(model.parameters(), **settings_dict(settings), **fixed)


def _of_model(kind: Callable[..., torch.optim.Optimizer], model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    return kind(model, **settings_dict(settings))


@dataclass(frozen=True)
class Entry:
    """An optimizer that a recipe can name.

    Args:
        settings: The class of its settings.
        build: Builds it from a model and settings.
        undivided: Why it cannot train parameters that are divided among processes; `None` if it can.
    """

    settings: type[OptimizerSettings]
    build: Callable[[nn.Module, Any], torch.optim.Optimizer]
    undivided: str | None = None


OPTIMIZERS: dict[str, Entry] = {
    "thor": Entry(THORSettings, partial(build, THOR)),
    "thor-muon": Entry(ThorMuonSettings, partial(build, ThorMuon)),
    "sgd": Entry(SGDSettings, partial(_of_parameters, torch.optim.SGD)),
    "momentum": Entry(MomentumSettings, partial(_of_parameters, torch.optim.SGD)),
    "nesterov": Entry(NesterovSettings, partial(_of_parameters, torch.optim.SGD, nesterov=True)),
    "adagrad": Entry(AdagradSettings, partial(_of_parameters, torch.optim.Adagrad)),
    "rmsprop": Entry(RMSpropSettings, partial(_of_parameters, torch.optim.RMSprop)),
    "adadelta": Entry(AdadeltaSettings, partial(_of_parameters, torch.optim.Adadelta)),
    "adam": Entry(AdamSettings, partial(_of_parameters, torch.optim.Adam)),
    "adamw": Entry(AdamWSettings, partial(_of_parameters, torch.optim.AdamW)),
    "muon": Entry(MuonSettings, partial(_of_model, MuonAdamW), "it orthogonalises whole matrices"),
    "lamb": Entry(LAMBSettings, partial(_of_model, LAMB)),
    "agc-sgd": Entry(AGCSGDSettings, partial(_of_model, AGCSGD)),
}


def default_settings() -> dict[str, OptimizerSettings]:
    """Return the default settings of every optimizer.

    Returns:
        One settings object for each key of `OPTIMIZERS`.
    """
    return {name: entry.settings() for name, entry in OPTIMIZERS.items()}


def build_optimizer(name: str, model: nn.Module, settings: OptimizerSettings | None = None) -> torch.optim.Optimizer:
    """Build an optimizer for all parameters of a model.

    Args:
        name: A key of `OPTIMIZERS`.
        model: The network.
        settings: An object of that optimizer's settings class; `None` stands for its defaults.

    Returns:
        The optimizer.

    Raises:
        UserError: If the optimizer is not known, or refuses its settings or the model.
    """
    require(name in OPTIMIZERS, f"optimizer={name} is not an optimizer: use one of {', '.join(OPTIMIZERS)}")
    entry = OPTIMIZERS[name]
    settings = entry.settings() if settings is None else settings
    require(
        type(settings) is entry.settings,
        f"settings={settings} are not for {name}: pass an object of class {entry.settings.__name__}",
    )
    try:
        return entry.build(model, settings)
    except ValueError as error:
        raise UserError(f"optimizer {name}: {error}") from error
