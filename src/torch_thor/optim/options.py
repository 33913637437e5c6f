"""The options of the optimizers: for each one the test of a value, the rule and the remedy.

Construction, new parameter groups, loaded state dicts and every step use this table, so a value is
refused by the same rule wherever it comes from.
"""

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_thor.intervals import as_interval, schedule_of


@dataclass(frozen=True)
class Option:
    """What the value of an option must be, and what a user can do.

    ``{default}`` stands for the optimizer's default.
    """

    test: Callable[[Any], bool]
    rule: str
    remedy: str


def number(value: Any) -> float | None:
    """Return a number or a one-element tensor as a float.

    The result is None for everything else, also for bool.
    """
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def real(test: Callable[[float], bool]) -> Callable[[Any], bool]:
    """Return a test for finite numbers."""

    def holds(value: Any) -> bool:
        found = number(value)
        return found is not None and math.isfinite(found) and test(found)

    return holds


def whole(value: Any) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def flag(value: Any) -> bool:
    """Return whether a value is True or False."""
    return isinstance(value, bool)


def _thresholds(value: Any) -> bool:
    numbers = [number(one) for one in value] if isinstance(value, tuple | list) else []
    if len(numbers) != 2:
        return False
    first, second = numbers
    return first is not None and second is not None and 0 <= second <= first


def _interval(value: Any) -> bool:
    if isinstance(value, Mapping):
        schedule_of(value)  # raises the error of its kind
        return True
    return callable(value) or whole(value)


def _one_of(*values: str) -> Option:
    return Option(lambda v: v in values, f"one of {values}", f"use {values[0]!r}, the default")


_BOUND = Option(
    lambda v: v is None or real(lambda x: x > 0)(v), "None or a number > 0", "None switches it off"
)
_SHARE = real(lambda v: 0 <= v < 1)
OF_GROUPS: dict[str, Option] = {  # what stands in each parameter group of THOR or ThorMuon
    "lr": Option(real(lambda v: v >= 0), "a finite number ≥ 0", "start from {default}"),
    "auto_lr": Option(
        flag,
        "True or False",
        "True takes smaller steps with weights that are trained already, False lr for all",
    ),
    "damping": Option(
        real(lambda v: v > 0),
        "a finite number > 0",
        "it keeps the factors invertible: start from {default}, and schedule it down, not to zero",
    ),
    "momentum": Option(_SHARE, "in [0, 1)", "{default} is usual, 0 switches it off"),
    "nesterov": Option(flag, "True or False", "leave it out for {default}"),
    "weight_decay": Option(real(lambda v: v >= 0), "a finite number ≥ 0", "0 switches it off"),
    "update_interval": Option(
        _interval,
        "a whole number of steps ≥ 1, or a schedule of torch_thor.intervals",
        "1 refreshes every step; start from {default}",
    ),
    "trace_thresholds": Option(
        _thresholds,
        "a pair (ω1, ω2) of numbers with 0 ≤ ω2 ≤ ω1: above ω1 a layer updates, below ω2 it stops",
        "the paper's THOR is (0.01, 0.0)",
    ),
    "split_dim": Option(
        lambda v: v is None or whole(v),
        "a whole number ≥ 1, or None for unsplit factors",
        "use 128, the paper's choice for ResNet-50, or choose_split_dim(model, batch).split_dim",
    ),
    "factor_decay": Option(_SHARE, "in [0, 1)", "0 takes the latest factors only"),
    "kl_clip": _BOUND,
    "max_update_ratio": _BOUND,
}
OPTIONS: dict[str, Option] = {
    **OF_GROUPS,
    "loss_reduction": _one_of("mean", "sum"),
    "fisher": _one_of("empirical", "sampled"),
    "nonfinite": _one_of("raise", "skip"),
    "loss_terms": Option(
        lambda v: v is None or callable(v) or whole(v),
        "a whole number ≥ 1, the terms that the loss of one step averages over",
        "None takes the leading dimension of the batch",
    ),
}


_COUNTER = Option(
    lambda v: number(v) is not None and float(v).is_integer() and v >= 0,
    "a whole number ≥ 0",
    "step() counts it: put it back",
)
COUNTERS = {"step": _COUNTER, "next_refresh": _COUNTER}


def check(
    optimizer: Callable[..., Any],
    values: Mapping[str, Any],
    options: Mapping[str, Option] = OPTIONS,
) -> None:
    """Raise ValueError for the first value that its option's rule refuses."""
    # Names without a rule are not looked at.
    for name, value in values.items():
        option = options.get(name)
        if option is None:
            continue
        try:
            holds = option.test(as_interval(value))
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from error
        if not holds:
            remedy = option.remedy.format(default=default_of(optimizer, name))
            raise ValueError(f"{name}={value!r}: {name} must be {option.rule}; {remedy}")


class OptionGroup(dict[str, Any]):
    """A parameter group whose values are plain, whoever sets them.

    So a checkpoint into which a trainer puts the group itself can be loaded, also without this
    package: it is saved as a dict.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        super().__init__()
        self.update(group)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value if key == "params" else as_interval(value))

    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


def group_of(param_group: Any) -> OptionGroup:
    """Return a parameter group that a user adds, as its optimizer holds it."""
    if not isinstance(param_group, Mapping):
        raise TypeError(
            f"param_group must be a dict, but got {type(param_group).__name__}: pass "
            '{"params": parameters}, and options of their own beside them'
        )
    return OptionGroup(param_group)


def default_of(optimizer: Callable[..., Any], name: str) -> Any:
    """Return the default of an option; None if there is none."""
    # a subclass may hand its arguments on as **kwargs, which do not name the option
    for owner in getattr(optimizer, "__mro__", (optimizer,)):
        argument = inspect.signature(owner).parameters.get(name)
        if argument is not None and argument.default not in (argument.empty, None):
            return argument.default
    if name == "lr":  # found from the weights, unless it is given
        return getattr(optimizer, "usual_lr", None)
    return None


def check_complete(
    optimizer: type, index: int, group: Mapping[str, Any], required: Collection[str]
) -> None:
    """Raise ValueError for an option that a parameter group lacks."""
    if missing := [name for name in required if name not in group]:
        raise ValueError(
            f"parameter group {index} has no {missing[0]!r} any more: every option must stand in "
            f"each group; put it back ({default_of(optimizer, missing[0])!r} is its default)"
        )
