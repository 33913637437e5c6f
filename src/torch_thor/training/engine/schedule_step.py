"""Setting the learning rate and the damping from their schedules, and checking that schedules fit the training."""

import torch

from torch_thor.training.config.schedules.curves import BOUNDED, FALLS, factor
from torch_thor.training.config.schedules.spec import ScheduleSpec
from torch_thor.training.errors import require


def apply(
    optimizer: torch.optim.Optimizer,
    key: str,
    spec: ScheduleSpec,
    step: int,
    steps_per_epoch: int,
    total_steps: int,
) -> None:
    """Set the learning rate or the damping of every parameter group for the next step.

    Args:
        optimizer: Any optimizer.
        key: `lr` or `damping`; groups without the key are not changed.
        spec: The schedule.
        step: Steps already taken (0 for the first).
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.
    """
    for group in optimizer.param_groups:
        if key in group:
            initial = group.setdefault(f"initial_{key}", group[key])
            final = None if spec.end is None else spec.end / initial
            group[key] = initial * factor(spec, step, steps_per_epoch, total_steps, final)


def check(
    optimizer: torch.optim.Optimizer,
    key: str,
    spec: ScheduleSpec,
    steps_per_epoch: int,
    total_steps: int,
) -> None:
    """Refuse a schedule that does not fit the training, before its first step.

    Args:
        optimizer: The optimizer with its initial settings.
        key: `lr` or `damping`.
        spec: The schedule.
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.

    Raises:
        UserError: If warm-up or horizon do not fit the length of the training, `end` is above the initial value, or the
            damping would become 0.
    """
    name = "schedule" if key == "lr" else f"{key}_schedule"
    epochs = total_steps / steps_per_epoch
    require(
        spec.warmup_epochs <= epochs,
        f"{name}.warmup_epochs={spec.warmup_epochs} is longer than the training ({epochs:g} epochs): "
        "shorten it, or raise epochs",
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
        initial = group.get(f"initial_{key}", group[key])
        final = None if spec.end is None else spec.end / initial
        require(
            final is None or spec.kind not in FALLS or final <= 1,
            f"{name}.end={spec.end} is above the initial {key}={initial}, and {spec.kind} can only decrease: lower it",
        )
        last = factor(spec, total_steps - 1, steps_per_epoch, total_steps, final)
        require(
            key == "lr" or last > 0,
            f"{name}: {spec.kind} sets {key} to 0 in the last step, but it must stay above 0: give horizon_epochs or "
            "horizon_steps above the length of the training",
        )
