"""The formulas of the schedules: a factor on the learning rate or the damping, as a pure function of the step.

No state is stored, so a resumed run has the same schedule as an uninterrupted one. `step` is the number of steps
already taken, 0 before the first step.

n is the number of steps in an epoch, w the length of the warm-up and H the horizon, both in steps. Without a horizon, H
is the length of the run. The usual kinds count from 0. With t = `step`, p = max(0, t - w) / (H - w), and f the factor
at the end:

    constant     1
    linear       1 - p (1 - f)
    cosine       f + (1 - f) (1 + cos πp) / 2
    polynomial   f + (1 - f) (1 - p)^power        BERT's lr and damping with THOR: `end`, `horizon_steps`
    exponential  rate^(max(0, t - w) / n)         the rate is a factor for each epoch
    step         gamma^(milestones m ≤ t / n)     epochs of the training: the first step after m whole epochs

The two schedules of ResNet-50 with THOR count from 1, as the reference implementation does: the first step has
e = 1 / n. With t = `step` + 1, e = t / n and E = H / n, both from the beginning of the training:

    thor-lr      (1 - e / E)^decay, · 1/2 where e ≥ decay_epochs, · 1/2 again where e ≥ decay_epochs + 1
    thor-damping rate^(e / 10)                    the rate is a factor for ten epochs

The last step of epoch number `decay_epochs` is therefore the first one with a halved learning rate.

Warm-up multiplies any of them by (`step` + 1) / w in the first w steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_thor import schedules

if TYPE_CHECKING:  # the module of ScheduleSpec imports this one
    from torch_thor.training.config.schedules.spec import ScheduleSpec


@dataclass(frozen=True)
class Moment:
    """The position of one step, in the units of the formulas.

    Args:
        progress: p, from 0 after the warm-up to 1 at the horizon.
        warmed_epochs: Epochs since the end of the warm-up; 0 at the first step after it.
        epochs: Epochs since the beginning; 0 at the first step.
        step: Steps already taken.
        steps_per_epoch: n.
        horizon_epochs: E, the horizon in epochs.
    """

    progress: float
    warmed_epochs: float
    epochs: float
    step: int
    steps_per_epoch: int
    horizon_epochs: float


def _thor_lr(spec: ScheduleSpec, at: Moment) -> float:
    return schedules.resnet50_lr(
        at.step,
        at.steps_per_epoch,
        lr=1.0,
        decay=spec.decay,
        epochs=at.horizon_epochs,
        decay_epochs=spec.decay_epochs,
    )


def _thor_damping(spec: ScheduleSpec, at: Moment) -> float:
    return schedules.resnet50_damping(at.step, at.steps_per_epoch, damping=1.0, rate=spec.rate)


FALLS: dict[str, Callable[[ScheduleSpec, Moment], float]] = {  # from 1 to 0; `factor` rescales them to end at `final`
    "linear": lambda spec, at: 1.0 - at.progress,
    "cosine": lambda spec, at: (1.0 + math.cos(math.pi * at.progress)) / 2.0,
    "polynomial": lambda spec, at: (1.0 - at.progress) ** spec.power,
}
BOUNDED = (*FALLS, "thor-lr")  # kinds that have a horizon
SHAPES: dict[str, Callable[[ScheduleSpec, Moment], float]] = {
    "constant": lambda spec, at: 1.0,
    **FALLS,
    "exponential": lambda spec, at: spec.rate**at.warmed_epochs,
    "step": lambda spec, at: spec.gamma ** sum(milestone <= at.epochs for milestone in spec.milestones),
    "thor-lr": _thor_lr,
    "thor-damping": _thor_damping,
}


def factor(spec: ScheduleSpec, step: int, steps_per_epoch: int, total_steps: int, final: float | None = None) -> float:
    """Return the factor for one step.

    Args:
        spec: The schedule; `schedule_step.check` has accepted it.
        step: Steps already taken (0 for the first).
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.
        final: Factor reached at the horizon; `None` stands for that of the schedule.

    Returns:
        The factor on the starting value.
    """
    warmup = spec.warmup(steps_per_epoch)
    horizon = spec.horizon(steps_per_epoch, total_steps)
    past = max(0, step - warmup)
    moment = Moment(
        progress=past / max(1, horizon - warmup),
        warmed_epochs=past / steps_per_epoch,
        epochs=step / steps_per_epoch,
        step=step,
        steps_per_epoch=steps_per_epoch,
        horizon_epochs=horizon / steps_per_epoch,
    )
    value = SHAPES[spec.kind](spec, moment)
    if spec.kind in FALLS:
        low = spec.final if final is None else final
        value = low + (1.0 - low) * value
    return value * (step + 1) / warmup if step < warmup else value
