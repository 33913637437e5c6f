"""One clear error for one wrong option: the value, the rule and the remedy."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch


def number(value: Any) -> float | None:
    """Return a plain number or a one-element tensor as a float, else None.

    Args:
        value: anything.

    Returns:
        The number; None for what is none, truth values among it.
    """
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def whole(value: Any) -> bool:
    """Return whether a value is a whole number.

    Args:
        value: anything.

    Returns:
        Whether it is an int, and no truth value.
    """
    return isinstance(value, int) and not isinstance(value, bool)


def require(name: str, value: Any, holds: bool, rule: str, remedy: str) -> None:
    """Refuse an option unless it holds.

    Args:
        name: the option.
        value: what was given.
        holds: whether it is right.
        rule: what it must be.
        remedy: what to do.

    Raises:
        ValueError: it does not hold.
    """
    if not holds:
        raise ValueError(f"{name}={value!r}: {name} must be {rule}; {remedy}")


def in_range(name: str, value: Any, test: Callable[[float], bool], rule: str, remedy: str) -> None:
    """Refuse an option unless it is a finite number that passes a test.

    Args:
        name: the option.
        value: what was given: a number or a one-element tensor.
        test: the test.
        rule: what it must be.
        remedy: what to do.
    """
    found = number(value)
    require(name, value, found is not None and math.isfinite(found) and test(found), rule, remedy)


def check_interval(name: str, value: Any) -> int:
    """Check a number of steps, given by the user or by the user's callable.

    Args:
        name: what to call it in the message.
        value: the number.

    Returns:
        The number.
    """
    require(name, value, whole(value) and value >= 1, "a whole number of steps ≥ 1", "1 refreshes every step")
    return int(value)


def check_flags(group: Mapping[str, Any], *names: str) -> None:
    """Check options that are True or False.

    Args:
        group: a parameter group, defaults filled in.
        names: the options.
    """
    for name in names:
        require(name, group[name], isinstance(group[name], bool), "True or False", "leave it out for False")
    foreach = group["foreach"]
    require("foreach", foreach, foreach is None or isinstance(foreach, bool), "None, True or False", "leave it out")
