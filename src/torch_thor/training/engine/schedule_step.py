"""Setting an optimizer's learning rate and damping from their schedules, and checking that these fit the training."""

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
    """Set one setting of every parameter group for the coming step, from the value that it started with.

    Args:
        optimizer: Any optimizer.
        key: `lr` or `damping`; a group without the key is left alone.
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
        optimizer: The optimizer, as it starts.
        key: `lr` or `damping`.
        spec: Its schedule.
        steps_per_epoch: Optimizer steps in one epoch.
        total_steps: Optimizer steps in the whole run.
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
        f"{name}.{field}={horizon} is shorter than the training ({training}), and {key} would be 0 or no number "
        f"after it: raise it to that or more, or lower epochs",
    )
    for group in optimizer.param_groups:
        if key not in group:
            continue
        initial = group.get(f"initial_{key}", group[key])
        final = None if spec.end is None else spec.end / initial
        require(
            final is None or spec.kind not in FALLS or final <= 1,
            f"{name}.end={spec.end} is above {key}={initial}, where {spec.kind} starts: lower it",
        )
        last = factor(spec, total_steps - 1, steps_per_epoch, total_steps, final)
        require(
            key == "lr" or last > 0,
            f"{name}: {spec.kind} brings {key} to 0 at the last step, and it must stay above: "
            "give horizon_epochs or horizon_steps above the training's length",
        )
