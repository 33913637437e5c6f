"""Schedules of learning rate and damping: factors on starting values, as functions of the step.

No state is stored, so a resumed run has the schedule of an uninterrupted run. `step` is the number
of steps already taken, n the number of steps in an epoch, w the length of the warm-up and H the
horizon in steps; without a horizon, H is the length of the run. The usual kinds count from 0. With
t = `step`, p = max(0, t - w) / (H - w), and f the factor at the end:

    constant     1
    linear       1 - p (1 - f)
    cosine       f + (1 - f) (1 + cos πp) / 2
    polynomial   f + (1 - f) (1 - p)^power        BERT's lr and damping with THOR: `end` and
                                                  `horizon_steps`
    exponential  rate^(max(0, t - w) / n)         the rate is a factor for each epoch
    step         gamma^(milestones m ≤ t / n)     epochs of the training: the first step after m
                                                  whole epochs

The two schedules of ResNet-50 with THOR count from 1, as the reference implementation does: the
first step has e = 1 / n. With t = `step` + 1, e = t / n and E = H / n, both from the beginning of
the training:

    thor-lr      (1 - e / E)^decay                · 1/2 where e ≥ decay_epochs, · 1/2 again where
                                                  e ≥ decay_epochs + 1
    thor-damping rate^(e / 10)                    the rate is a factor for ten epochs

The last step of epoch number `decay_epochs` is therefore the first with a halved learning rate.

Warm-up multiplies any of them by (`step` + 1) / w in the first w steps.
"""

import math
from typing import Any

import torch

from torch_thor.errors import require
from torch_thor.schedules import resnet50_damping, resnet50_lr
from torch_thor.training.recipe_model import Recipe, Schedule

FALLS = ("linear", "cosine", "polynomial")  # from 1 to `final`; like thor-lr, they end at a horizon


def apply(
    optimizer: torch.optim.Optimizer, recipe: Recipe, step: int, steps_per_epoch: int
) -> None:
    """Set all parameter groups' learning rate and damping for the next step, after `step` steps."""
    phase, first = recipe.phase_at(step)
    place = step, steps_per_epoch, recipe.total_steps(steps_per_epoch)
    lr, place_of_lr, scale = recipe.schedule, place, 1.0
    if phase is not None:
        scale = phase.lr_factor
        if phase.schedule is not None:
            lr, place_of_lr = phase.schedule, (step - first, phase.steps, phase.steps)
    for group in optimizer.param_groups:
        _set(group, "lr", lr, place_of_lr, scale)
        _set(group, "damping", recipe.damping_schedule, place)


def _set(
    group: dict[str, Any],
    option: str,
    schedule: Schedule,
    place: tuple[int, int, int],
    scale: float = 1.0,
) -> None:
    if option in group:
        initial = group.setdefault(f"initial_{option}", group[option]) * scale
        final = None if schedule.end is None else schedule.end / initial
        group[option] = initial * factor(schedule, *place, final)


def check(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> None:
    """Refuse a warm-up or a horizon that does not fit the length of the training."""
    total, schedules = recipe.total_steps(steps_per_epoch), {"schedule": recipe.schedule}
    if any("damping" in group for group in optimizer.param_groups):
        schedules["damping_schedule"] = recipe.damping_schedule
    for key, schedule in schedules.items():
        given = "warmup_epochs" if schedule.warmup_steps is None else "warmup_steps"
        require(
            _warmup(schedule, steps_per_epoch) <= total,
            f"{key}.{given}={getattr(schedule, given)} is longer than the training ({total} "
            "steps): shorten it, or train longer",
        )
        given = "horizon_steps" if schedule.horizon_epochs is None else "horizon_epochs"
        require(
            schedule.kind not in (*FALLS, "thor-lr")
            or _horizon(schedule, steps_per_epoch, total) >= total,
            f"{key}.{given}={getattr(schedule, given)} is shorter than the training ({total} "
            f"steps), and {schedule.kind} is 0 or undefined after it: raise it, or train shorter",
        )


def _warmup(schedule: Schedule, steps_per_epoch: int) -> int:
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round(schedule.warmup_epochs * steps_per_epoch)


def _horizon(schedule: Schedule, steps_per_epoch: int, total_steps: int) -> float:
    if schedule.horizon_epochs is not None:
        return schedule.horizon_epochs * steps_per_epoch
    return schedule.horizon_steps or total_steps


def factor(
    schedule: Schedule,
    step: int,
    steps_per_epoch: int,
    total_steps: int,
    final: float | None = None,
) -> float:
    """Return the factor on the starting value for a step.

    It ends at `final`, or by default at the schedule's end.
    """
    warmup = _warmup(schedule, steps_per_epoch)
    horizon = _horizon(schedule, steps_per_epoch, total_steps)
    past = max(0, step - warmup)
    progress = past / max(1, horizon - warmup)
    value = 1.0
    match schedule.kind:
        case "linear":
            value = 1.0 - progress
        case "cosine":
            value = (1.0 + math.cos(math.pi * progress)) / 2.0
        case "polynomial":
            value = (1.0 - progress) ** schedule.power
        case "exponential":
            value = schedule.rate ** (past / steps_per_epoch)
        case "step":
            passed = [epoch for epoch in schedule.milestones if epoch <= step / steps_per_epoch]
            value = schedule.gamma ** len(passed)
        case "thor-lr":
            value = resnet50_lr(step, steps_per_epoch, lr=1.0, decay=schedule.decay,
            epochs=horizon / steps_per_epoch,
                                decay_epochs=schedule.decay_epochs)  # fmt: skip
        case "thor-damping":
            value = resnet50_damping(step, steps_per_epoch, damping=1.0, rate=schedule.rate)
    if schedule.kind in FALLS:
        low = schedule.final if final is None else final
        value = low + (1.0 - low) * value
    return value * (step + 1) / warmup if step < warmup else value
