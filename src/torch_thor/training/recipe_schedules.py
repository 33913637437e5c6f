"""Schedules of learning rate and damping: factors on starting values, as functions of the step.

No state is stored, so a resumed run has the schedule of an uninterrupted one. `step` is the number
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

The last step of epoch number `decay_epochs` is therefore the first one with a halved learning rate.

Warm-up multiplies any of them by (`step` + 1) / w in the first w steps.
"""

import math
from typing import Any, NamedTuple

import torch

from torch_thor.errors import require
from torch_thor.schedules import resnet50_damping, resnet50_lr
from torch_thor.training.recipe_model import Phase, Recipe, Schedule

FALLS = ("linear", "cosine", "polynomial")  # from 1 to `final`; like thor-lr, they end at a horizon


class _Span(NamedTuple):
    """A schedule in force: the option it sets, its key in the recipe, and the steps it counts."""

    option: str
    key: str
    schedule: Schedule
    first: int
    epoch: int
    total: int
    scale: float = 1.0


def _spans(
    recipe: Recipe, steps_per_epoch: int, phase: Phase | None, first: int, number: int = 0
) -> tuple[_Span, _Span]:
    total = recipe.total_steps(steps_per_epoch)
    scale = 1.0 if phase is None else phase.lr_factor
    lr = _Span("lr", "schedule", recipe.schedule, 0, steps_per_epoch, total, scale)
    if phase is not None and phase.schedule is not None:
        lr = _Span(
            "lr",
            f"phases[{number}].schedule",
            phase.schedule,
            first,
            phase.steps,
            phase.steps,
            scale,
        )
    return lr, _Span(
        "damping", "damping_schedule", recipe.damping_schedule, 0, steps_per_epoch, total
    )


def apply(
    optimizer: torch.optim.Optimizer, recipe: Recipe, step: int, steps_per_epoch: int
) -> None:
    """Set all parameter groups' learning rate and damping for the next step, after `step` steps."""
    for span in _spans(recipe, steps_per_epoch, *recipe.phase_at(step)):
        for group in optimizer.param_groups:
            if span.option in group:
                initial, final = _start(group, span)
                group[span.option] = initial * factor(
                    span.schedule, step - span.first, span.epoch, span.total, final
                )


def _start(group: dict[str, Any], span: _Span) -> tuple[float, float | None]:
    """Return a group's starting value, and the end factor if the schedule names the last value."""
    initial = group.setdefault(f"initial_{span.option}", group[span.option]) * span.scale
    return initial, None if span.schedule.end is None else span.schedule.end / initial


def factor(
    schedule: Schedule,
    step: int,
    steps_per_epoch: int,
    total_steps: int,
    final: float | None = None,
) -> float:
    """Return the factor on the starting value for a step.

    It ends at `final`, or by default at that of the schedule.
    """
    warmup = (
        round(schedule.warmup_epochs * steps_per_epoch)
        if schedule.warmup_steps is None
        else schedule.warmup_steps
    )
    horizon, past = _horizon(schedule, steps_per_epoch, total_steps), max(0, step - warmup)
    progress = past / max(1, horizon - warmup)
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
            value = schedule.gamma ** sum(
                milestone <= step / steps_per_epoch for milestone in schedule.milestones
            )
        case "thor-lr":
            value = resnet50_lr(step, steps_per_epoch, lr=1.0, decay=schedule.decay,
            epochs=horizon / steps_per_epoch,
                                decay_epochs=schedule.decay_epochs)  # fmt: skip
        case "thor-damping":
            value = resnet50_damping(step, steps_per_epoch, damping=1.0, rate=schedule.rate)
        case _:
            value = 1.0
    if schedule.kind in FALLS:
        low = schedule.final if final is None else final
        value = low + (1.0 - low) * value
    return value * (step + 1) / warmup if step < warmup else value


def _horizon(schedule: Schedule, steps_per_epoch: int, total_steps: int) -> float:
    if schedule.horizon_steps is not None:
        return schedule.horizon_steps
    return (
        total_steps
        if schedule.horizon_epochs is None
        else schedule.horizon_epochs * steps_per_epoch
    )


def check(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> None:
    """Refuse schedules that would misfit the training's length, rise, or reach a damping of 0."""
    for number, phase in enumerate(recipe.phases or (None,)):
        for span in _spans(recipe, steps_per_epoch, phase, 0, number):
            _check(optimizer, span)


def _check(optimizer: torch.optim.Optimizer, span: _Span) -> None:
    option, key, schedule, total = span.option, span.key, span.schedule, span.total
    warmup = (
        f"warmup_epochs={schedule.warmup_epochs}"
        if schedule.warmup_steps is None
        else f"warmup_steps={schedule.warmup_steps}"
    )
    by = "horizon_epochs" if schedule.horizon_steps is None else "horizon_steps"
    training = f"the training ({total / span.epoch:g} epochs, {total} steps)"
    require(
        schedule.warmup_epochs <= total / span.epoch and (schedule.warmup_steps or 0) <= total,
        f"{key}.{warmup} is longer than {training}: shorten it, or raise epochs",
    )
    require(
        schedule.kind not in (*FALLS, "thor-lr") or _horizon(schedule, span.epoch, total) >= total,
        f"{key}.{by}={getattr(schedule, by)} is shorter than {training}, and {option} would be 0 "
        "or undefined after it: raise it, or lower epochs",
    )
    for group in optimizer.param_groups:
        if option in group:
            initial, final = _start(group, span)
            require(
                final is None or schedule.kind not in FALLS or final <= 1,
                f"{key}.end={schedule.end} is above the initial {option}={initial:g}, and "
                f"{schedule.kind} can only decrease: lower it",
            )
            require(
                option == "lr" or factor(schedule, total - 1, span.epoch, total, final) > 0,
                f"{key}: {schedule.kind} sets {option} to 0 in the last step, but it must stay "
                f"above 0: give {key}.horizon_epochs or {key}.horizon_steps above the length of "
                "the training",
            )
