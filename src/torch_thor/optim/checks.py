"""Checks of options: one error for each option out of range, which names the value, the rule and the remedy."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch


def number(value: Any) -> float | None:
    """Return a plain number or a one-element tensor as a float."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def whole(value: Any) -> bool:
    """Return whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def require(name: str, value: Any, holds: bool, rule: str, remedy: str) -> None:
    """Raise an error for an option unless it satisfies a rule."""
    if not holds:
        raise ValueError(f"{name}={value!r}: {name} must be {rule}; {remedy}")


def in_range(name: str, value: Any, test: Callable[[float], bool], rule: str, remedy: str) -> None:
    """Raise an error for an option unless it is a finite number that passes a test."""
    found = number(value)
    require(name, value, found is not None and math.isfinite(found) and test(found), rule, remedy)


def check_flags(group: Mapping[str, Any], *names: str) -> None:
    """Check options that are True or False, and ``foreach``, which may also be None."""
    for name in names:
        require(name, group[name], isinstance(group[name], bool), "True or False", "leave it out for False")
    foreach = group["foreach"]
    require("foreach", foreach, foreach is None or isinstance(foreach, bool), "None, True or False", "leave it out")
