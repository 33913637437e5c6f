"""Schedules: a factor on the learning rate, or on the damping, as a pure function of the step.

Steps are counted from 0; the factor for step t is set before step t is taken. Nothing is stored, so a resumed
run has the schedule that it would have had. With n steps an epoch, E epochs, w warm-up steps, T = nE and
p = (t - w) / (T - w):

    warm-up      (t + 1) / w                      while t < w, for every kind
    constant     1
    linear       1 - p (1 - final)
    cosine       final + (1 - final) (1 + cos πp) / 2
    exponential  rate ^ ((t - w) / n)             the rate is a factor for each epoch
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_thor.training.errors import require


@dataclass(frozen=True)
class ScheduleSpec:
    """One schedule.

    Args:
        kind: constant, linear, cosine or exponential.
        warmup_epochs: Epochs (fractions are fine) of linear growth from nothing to the full value.
        final: Factor reached at the end (linear and cosine).
        rate: Factor for each epoch (exponential).
    """

    kind: str = "constant"
    warmup_epochs: float = 0.0
    final: float = 0.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        require(self.kind in SHAPES, f"kind={self.kind} is no schedule: use one of {', '.join(SHAPES)}")
        require(self.warmup_epochs >= 0, f"warmup_epochs={self.warmup_epochs} must be 0 or more")
        require(
            0 <= self.final <= 1,
            f"final={self.final} must lie in [0, 1]: it is a factor on the starting value",
        )
        require(0 < self.rate <= 1, f"rate={self.rate} must lie in (0, 1]: it is the factor for each epoch")


@dataclass(frozen=True)
class Moment:
    """A point after the warm-up: `progress` goes from 0 to 1, `epochs` counts epochs."""

    progress: float
    epochs: float


SHAPES: dict[str, Callable[[ScheduleSpec, Moment], float]] = {
    "constant": lambda spec, at: 1.0,
    "linear": lambda spec, at: 1.0 - at.progress * (1.0 - spec.final),
    "cosine": lambda spec, at: spec.final + (1.0 - spec.final) * (1.0 + math.cos(math.pi * at.progress)) / 2.0,
    "exponential": lambda spec, at: spec.rate**at.epochs,
}


def factor(spec: ScheduleSpec, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The factor for one step.

    Args:
        spec: The schedule.
        step: Steps already taken (0 for the first).
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.

    Returns:
        The factor on the starting value.
    """
    warmup = round(spec.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    past = step - warmup
    moment = Moment(progress=past / max(1, total_steps - warmup), epochs=past / steps_per_epoch)
    return SHAPES[spec.kind](spec, moment)


def apply(optimizer: torch.optim.Optimizer, key: str, value: float) -> None:
    """Scale one setting of every parameter group from the value that it started with.

    Args:
        optimizer: Any optimizer.
        key: `lr` or `damping`; a group without the key is left alone.
        value: The factor, from `factor`.
    """
    for group in optimizer.param_groups:
        if key in group:
            group[key] = group.setdefault(f"initial_{key}", group[key]) * value
