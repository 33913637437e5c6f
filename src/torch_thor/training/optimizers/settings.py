"""The settings of the first-order optimizers in a recipe.

Where torch has the optimizer, names and defaults are torch's, but for `betas`, which are two keys here, and for the
learning rate and momentum of the SGD family, where torch's 0.001 without momentum is what nobody trains an image
classifier with.
"""

import math
from dataclasses import dataclass

from torch_thor.training.errors import require


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
        require(0 < self.lr < math.inf, f"lr={self.lr} must be above 0")
        require(
            0 <= self.weight_decay < math.inf,
            f"weight_decay={self.weight_decay} must be 0 or more; 0 switches it off",
        )


def _decays(settings: OptimizerSettings, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(0 <= value < 1, f"{name}={value} must lie in [0, 1): it is what one step keeps of those before")


def _not_negative(settings: OptimizerSettings, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(0 <= value < math.inf, f"{name}={value} must be 0 or more")


@dataclass(frozen=True)
class SGDSettings(OptimizerSettings):
    """`torch.optim.SGD`.

    Args:
        momentum: Momentum.
        nesterov: Whether it is Nesterov's.
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(self, "momentum")
        require(
            self.momentum > 0 or not self.nesterov,
            f"momentum={self.momentum} must be above 0 for Nesterov's; nesterov=false is plain SGD",
        )


@dataclass(frozen=True)
class MomentumSettings(OptimizerSettings):
    """`torch.optim.SGD` with heavy-ball momentum: the baseline that THOR's authors call Momentum.

    Args:
        momentum: Momentum.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(self, "momentum")


@dataclass(frozen=True)
class NesterovSettings(MomentumSettings):
    """`torch.optim.SGD` with Nesterov's momentum.

    Args:
        momentum: Momentum, above 0.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.momentum > 0, f"momentum={self.momentum} must be above 0: without it, use optimizer=sgd")


@dataclass(frozen=True)
class AGCSGDSettings(SGDSettings):
    """`AGCSGD`: SGD on adaptively clipped gradients.

    Args:
        dampening: Share of the gradient that does not enter the momentum.
        dampen_first: Whether the first step is dampened too, as in the code of AGC's authors; torch's SGD does not.
        clip_factor: The largest ratio of a unit's gradient norm to its weight norm.
        eps: The weight norm that a unit has at least.
    """

    dampening: float = 0.0
    dampen_first: bool = False
    clip_factor: float = 0.01
    eps: float = 1e-3


@dataclass(frozen=True)
class AdagradSettings(OptimizerSettings):
    """`torch.optim.Adagrad`.

    Args:
        lr_decay: The learning rate of step t is lr / (1 + (t - 1) lr_decay), beside any schedule.
        initial_accumulator_value: What the sum of squared gradients starts from.
        eps: Added to the root of that sum.
    """

    lr: float = 0.01
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        _not_negative(self, "lr_decay", "initial_accumulator_value", "eps")


@dataclass(frozen=True)
class RMSpropSettings(OptimizerSettings):
    """`torch.optim.RMSprop`.

    Args:
        alpha: Decay of the running mean of the squared gradient.
        eps: Added to the root of that mean.
        momentum: Momentum on the scaled gradient.
        centered: Whether the gradient's running mean is taken off, so that the variance scales it.
    """

    lr: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(self, "alpha", "momentum")
        _not_negative(self, "eps")


@dataclass(frozen=True)
class AdadeltaSettings(OptimizerSettings):
    """`torch.optim.Adadelta`.

    Args:
        rho: Decay of the running means of squared gradients and squared steps.
        eps: Added to both.
    """

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(self, "rho")
        _not_negative(self, "eps")


@dataclass(frozen=True)
class AdamSettings(OptimizerSettings):
    """`torch.optim.Adam`; its weight decay is a part of the gradient.

    Args:
        beta1: Decay of the running mean of the gradient.
        beta2: Decay of the running mean of its square.
        eps: Added to the root of that square.
        amsgrad: Whether the largest mean square so far is used.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(self, "beta1", "beta2")
        _not_negative(self, "eps")


@dataclass(frozen=True)
class AdamWSettings(AdamSettings):
    """`torch.optim.AdamW`; its weight decay stands apart from the gradient.

    Args:
        beta1: Decay of the running mean of the gradient.
        beta2: Decay of the running mean of its square.
        eps: Added to the root of that square.
        amsgrad: Whether the largest mean square so far is used.
    """

    weight_decay: float = 0.01


@dataclass(frozen=True)
class LAMBSettings(OptimizerSettings):
    """`LAMB`, without decay and trust ratio for biases and gains.

    Args:
        beta1: Decay of the running mean of the gradient.
        beta2: Decay of the running mean of its square.
        eps: Added to the root of the second moment.
    """

    lr: float = 0.01
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(self, "beta1", "beta2")
        _not_negative(self, "eps")


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

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(self, "momentum")
