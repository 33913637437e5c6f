"""Sets the learning rate and the damping from their schedules, and checks that the schedules fit the training."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torch_thor.training.config.phases import phase_at
from torch_thor.training.config.run_config import RunConfig
from torch_thor.training.config.schedules.curves import BOUNDED, FALLS, factor
from torch_thor.training.config.schedules.spec import ScheduleSpec
from torch_thor.training.errors import require


@dataclass(frozen=True)
class Span:
    """The part of a training run that a schedule applies to: the whole run, or a phase with its own schedule.

    Args:
        key: `lr` or `damping`.
        name: The key of the schedule in a recipe, for error messages.
        spec: The schedule.
        first: Number of training steps before the schedule starts.
        steps: Length of the schedule, in steps.
        steps_per_epoch: Number of steps that the schedule counts as one epoch.
        scale: The factor on the initial value.
    """

    key: str
    name: str
    spec: ScheduleSpec
    first: int
    steps: int
    steps_per_epoch: int
    scale: float = 1.0


def spans_at(config: RunConfig, step: int, steps_per_epoch: int, total_steps: int) -> Iterator[Span]:
    """Find the schedules that apply to a step.

    Args:
        config: The configuration of the training run.
        step: Number of completed steps (0 before the first step).
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.

    Yields:
        The span of the learning rate, then the span of the damping.
    """
    whole = (0, total_steps, steps_per_epoch)
    if config.phases:
        index, first = phase_at(config.phases, step)
        phase = config.phases[index]
        if phase.schedule is None:
            yield Span("lr", "schedule", config.schedule, *whole, scale=phase.lr_factor)
        else:
            name = f"phases[{index}].schedule"
            yield Span("lr", name, phase.schedule, first, phase.steps, phase.steps, scale=phase.lr_factor)
    else:
        yield Span("lr", "schedule", config.schedule, *whole)
    yield Span("damping", "damping_schedule", config.damping_schedule, *whole)


def apply_all(
    optimizer: torch.optim.Optimizer, config: RunConfig, step: int, steps_per_epoch: int, total_steps: int
) -> None:
    """Set the learning rate and the damping of all parameter groups for the next step.

    Args:
        optimizer: Any optimizer.
        config: The configuration of the training run.
        step: Number of completed steps (0 before the first step).
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.
    """
    for span in spans_at(config, step, steps_per_epoch, total_steps):
        apply(optimizer, span.key, span.spec, step - span.first, span.steps_per_epoch, span.steps, scale=span.scale)


def check_all(optimizer: torch.optim.Optimizer, config: RunConfig, steps_per_epoch: int, total_steps: int) -> None:
    """Check that all schedules fit the training, before its first step.

    Args:
        optimizer: The optimizer with its initial settings.
        config: The configuration of the training run.
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.

    Raises:
        UserError: If a schedule does not fit the training.
    """
    first = 0
    for steps in [phase.steps for phase in config.phases] or [total_steps]:
        for span in spans_at(config, first, steps_per_epoch, total_steps):
            check(optimizer, span.key, span.spec, span.steps_per_epoch, span.steps, name=span.name, scale=span.scale)
        first += steps


def apply(
    optimizer: torch.optim.Optimizer,
    key: str,
    spec: ScheduleSpec,
    step: int,
    steps_per_epoch: int,
    total_steps: int,
    *,
    scale: float = 1.0,
) -> None:
    """Set the learning rate or the damping of every parameter group for the next step.

    Args:
        optimizer: Any optimizer.
        key: `lr` or `damping`; groups without the key are not changed.
        spec: The schedule.
        step: Number of completed steps (0 before the first step).
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.
        scale: The factor on the initial value.
    """
    for group in optimizer.param_groups:
        if key in group:
            initial = group.setdefault(f"initial_{key}", group[key]) * scale
            final = None if spec.end is None else spec.end / initial
            group[key] = initial * factor(spec, step, steps_per_epoch, total_steps, final)


def check(
    optimizer: torch.optim.Optimizer,
    key: str,
    spec: ScheduleSpec,
    steps_per_epoch: int,
    total_steps: int,
    *,
    name: str | None = None,
    scale: float = 1.0,
) -> None:
    """Check that a schedule fits the training, before its first step.

    Args:
        optimizer: The optimizer with its initial settings.
        key: `lr` or `damping`.
        spec: The schedule.
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.
        name: The schedule's key in the recipe; `None` stands for `schedule` or `damping_schedule`.
        scale: The factor on the initial value.

    Raises:
        UserError: If the warm-up or the horizon does not fit the length of the training, `end` is above the initial
            value, or the damping would become 0.
    """
    name = name or ("schedule" if key == "lr" else f"{key}_schedule")
    epochs = total_steps / steps_per_epoch
    require(
        spec.warmup_epochs <= epochs,
        f"{name}.warmup_epochs={spec.warmup_epochs} is longer than the training ({epochs:g} epochs): "
        "shorten it, or raise epochs",
    )
    require(
        spec.warmup_steps is None or spec.warmup_steps <= total_steps,
        f"{name}.warmup_steps={spec.warmup_steps} is longer than the training ({total_steps} steps): shorten it",
    )
    horizon, field, training = spec.horizon_epochs, "horizon_epochs", f"{epochs:g} epochs"
    if spec.horizon_steps is not None:
        horizon, field, training = spec.horizon_steps, "horizon_steps", f"{total_steps} steps"
    require(
        spec.kind not in BOUNDED or spec.horizon(steps_per_epoch, total_steps) >= total_steps,
        f"{name}.{field}={horizon} is shorter than the training ({training}), and {key} would be 0 or undefined "
        f"after it: raise it to that or more, or lower epochs",
    )
    for group in optimizer.param_groups:
        if key not in group:
            continue
        initial = group.get(f"initial_{key}", group[key]) * scale
        final = None if spec.end is None else spec.end / initial
        require(
            final is None or spec.kind not in FALLS or final <= 1,
            f"{name}.end={spec.end} is above the initial {key}={initial:g}, and {spec.kind} can only decrease: "
            "lower it",
        )
        last = factor(spec, total_steps - 1, steps_per_epoch, total_steps, final)
        require(
            key == "lr" or last > 0,
            f"{name}: {spec.kind} sets {key} to 0 in the last step, but it must stay above 0: give "
            f"{name}.horizon_epochs or {name}.horizon_steps above the length of the training",
        )
