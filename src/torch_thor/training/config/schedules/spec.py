"""The settings of a schedule in a recipe."""

import math
from dataclasses import dataclass

from torch_thor.training.config.schedules.curves import BOUNDED, SHAPES
from torch_thor.training.errors import require


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule of the learning rate or the damping. A kind ignores the settings that belong to other kinds.

    Args:
        kind: The formula: constant, linear, cosine, polynomial, exponential, step, thor-lr or thor-damping.
        warmup_epochs: Length of a linear warm-up, in epochs; fractions are allowed, and 0 is no warm-up.
        warmup_steps: Length of the warm-up in steps; give only one of the two.
        final: Factor reached at the horizon (linear, cosine, polynomial), in [0, 1].
        rate: Factor per epoch (exponential) or per ten epochs (thor-damping), in (0, 1].
        end: Value reached at the horizon (linear, cosine, polynomial), instead of the factor `final`; `None` uses
            `final`.
        power: Exponent of polynomial.
        milestones: Epochs after which step multiplies the value by `gamma`.
        gamma: Factor at each milestone of step.
        decay: Exponent of thor-lr.
        decay_epochs: Epoch from which thor-lr is halved; it is halved again one epoch later. `None` never halves it.
        horizon_epochs: Where linear, cosine, polynomial and thor-lr end, in epochs from the beginning of the training.
            It must not be shorter than the training. `None` stands for the length of the training.
        horizon_steps: The horizon in steps; give only one of the two.
    """

    kind: str = "constant"
    warmup_epochs: float = 0.0
    warmup_steps: int | None = None
    final: float = 0.0
    rate: float = 1.0
    end: float | None = None
    power: float = 1.0
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    decay: float = 1.0
    decay_epochs: float | None = None
    horizon_epochs: float | None = None
    horizon_steps: int | None = None

    def __post_init__(self) -> None:
        require(self.kind in SHAPES, f"kind={self.kind} is not a schedule: use one of {', '.join(SHAPES)}")
        require(0 <= self.warmup_epochs < math.inf, f"warmup_epochs={self.warmup_epochs} must be 0 or more")
        require(
            self.warmup_steps is None or self.warmup_steps >= 0,
            f"warmup_steps={self.warmup_steps} must be 0 or more; null takes warmup_epochs",
        )
        require(
            self.warmup_steps is None or self.warmup_epochs == 0,
            f"warmup_epochs={self.warmup_epochs} and warmup_steps={self.warmup_steps} say the same: give one",
        )
        require(
            0 <= self.final <= 1,
            f"final={self.final} must lie in [0, 1]: it is a factor on the starting value",
        )
        require(0 < self.rate <= 1, f"rate={self.rate} must lie in (0, 1]: it is a factor per epoch")
        require(self.end is None or 0 <= self.end < math.inf, f"end={self.end} must be 0 or more; null uses final")
        require(
            self.end is None or self.final == 0,
            f"end={self.end} and final={self.final} both set the last value of the schedule: give one",
        )
        for name in ("power", "decay"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{name}={value} must be above 0: it is an exponent, and 1 is linear")
        require(0 < self.gamma <= 1, f"gamma={self.gamma} must lie in (0, 1]: it is the factor at each milestone")
        require(
            all(0 < milestone < math.inf for milestone in self.milestones)
            and all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False)),
            f"milestones={list(self.milestones)} must be positive and increasing: they are epochs, such as "
            "[30, 60, 80]",
        )
        require(
            self.kind != "step" or bool(self.milestones),
            "kind=step needs milestones: give the epochs after which to multiply by gamma, such as [30, 60, 80]",
        )
        require(
            self.decay_epochs is None or 0 <= self.decay_epochs < math.inf,
            f"decay_epochs={self.decay_epochs} must be 0 or more; null never halves",
        )
        require(
            self.horizon_epochs is None or self.horizon_steps is None,
            f"horizon_epochs={self.horizon_epochs} and horizon_steps={self.horizon_steps} both set the horizon: give "
            "one",
        )
        for name in ("horizon_epochs", "horizon_steps"):
            value = getattr(self, name)
            require(
                value is None or 0 < value < math.inf,
                f"{name}={value} must be above 0; null is the length of the training",
            )

    @property
    def ends_with_training(self) -> bool:
        """Whether the values of the schedule depend on the length of the training."""
        return self.kind in BOUNDED and self.horizon_epochs is None and self.horizon_steps is None

    def warmup(self, steps_per_epoch: int) -> int:
        """Return how long the warm-up is.

        Args:
            steps_per_epoch: Optimizer steps in one epoch.

        Returns:
            w, in steps.
        """
        return round(self.warmup_epochs * steps_per_epoch) if self.warmup_steps is None else self.warmup_steps

    def horizon(self, steps_per_epoch: int, total_steps: int) -> float:
        """Return the horizon, where the schedule ends.

        Args:
            steps_per_epoch: Optimizer steps in one epoch.
            total_steps: Optimizer steps in the whole run.

        Returns:
            H, in steps.
        """
        if self.horizon_steps is not None:
            return self.horizon_steps
        return total_steps if self.horizon_epochs is None else self.horizon_epochs * steps_per_epoch
