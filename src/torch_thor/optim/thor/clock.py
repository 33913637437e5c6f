"""When the groups refresh: each counts its own steps, in the group itself, where every checkpoint sees them.

``group["step"]`` counts the steps taken, ``group["next_refresh"]`` is the step of the next refresh, and
``group["update_interval"]`` (a number, a schedule or any callable) is asked on each refresh for the way to the next.
"""

from typing import TYPE_CHECKING

from torch_thor.optim.checks import check_interval
from torch_thor.optim.parameters import Group

if TYPE_CHECKING:
    from torch_thor.optim.thor.optimizer import THOR
    from torch_thor.optim.thor.step_inputs import StepInputs
from torch_thor.optim.thor.intervals import CALLABLE, from_plain, to_plain
from torch_thor.optim.thor.options import UpdateInterval


def next_refreshes(groups: list[Group]) -> list[int]:
    """Return the steps of the next refreshes as they will stand after this step, and change nothing.

    Args:
        groups: the optimizer's parameter groups.

    Returns:
        One step a group.
    """
    result = []
    for group in groups:
        step, upcoming, interval = int(group["step"]), int(group["next_refresh"]), group["update_interval"]
        if step >= upcoming:
            asked = check_interval(f"update_interval({step})", interval(step)) if callable(interval) else interval
            upcoming = step + asked
        result.append(upcoming)
    return result


def advance(thor: "THOR", inputs: "StepInputs") -> None:
    """Count the step, and have the next one gather what it will refresh.

    Args:
        thor: the optimizer.
        inputs: what was known of the step.
    """
    registry, groups, due = thor._registry, thor.param_groups, False
    if inputs.waiting and not inputs.due:
        registry.capture.finish_step()
    for group, upcoming in zip(groups, inputs.refreshes, strict=True):
        group.update(next_refresh=upcoming, step=group["step"] + 1)
        due = due or group["step"] >= upcoming
    if due:
        wanted = []
        for layer in registry.layers.values():
            group = registry.index.group(layer.weight)
            if group["step"] >= group["next_refresh"]:
                wanted.append(layer)
        registry.capture.want(wanted)
    if registry.replacement is not None:
        registry.watch_replacement(groups, thor.state)
    elif inputs.waiting or due:
        registry.capture.listen()
    if registry.warnings.untold:
        registry.warnings.tell()


def plain(group: Group) -> Group:
    """Return a group as a state dict holds it.

    Args:
        group: a parameter group.

    Returns:
        A copy with plain data for its interval.
    """
    return {**group, "update_interval": to_plain(group["update_interval"])}


def loaded_interval(saved: Group, own: UpdateInterval) -> UpdateInterval:
    """Return the interval that holds after a state dict was loaded.

    Args:
        saved: the group in the state dict.
        own: what the program gave; it stays where it is a function, or where the saved one was, since no checkpoint
            holds functions, and where the state dict has no interval.

    Returns:
        The saved number or schedule, or the program's own.

    Raises:
        ValueError: the state dict holds a text that is no schedule of this version.
    """
    interval: UpdateInterval | str = from_plain(saved.get("update_interval", own))
    of_the_program = callable(own) and to_plain(own) == CALLABLE
    return own if of_the_program or isinstance(interval, str) else interval
