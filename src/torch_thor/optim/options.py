"""The options of all optimizers, each declared once: what it means and what its value must be.

Construction, new parameter groups, loaded state dicts, every step and recipes use this table, so a
value is refused by the same rule wherever it comes from.
"""

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from torch_thor.distributed.options import Distributed
from torch_thor.intervals import as_interval, schedule_of

Scope = Literal["group", "counter", "optimizer", "attribute"]


@dataclass(frozen=True)
class Option:
    """What an option means, what its value must be, and what a user can do if it is not.

    Checks, the comparison of ranks, the keys of recipes and the documentation read these.
    ``{default}`` stands for the default of the optimizer in question.
    """

    test: Callable[[Any], bool]
    rule: str
    remedy: str
    meaning: str
    # in recipes, for options that these have
    type: Any = None
    # of optimizers whose constructor does not have it
    default: Any = None
    # a parameter group has it, or counts with it; or it is read at construction alone; or it is an
    # attribute, which can be set before every step
    scope: Scope = "group"
    # whether it must be the same on all ranks
    compared: bool = True
    error: Callable[[str], Exception] = ValueError


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
        exact = number(value)
        return exact is not None and math.isfinite(exact) and test(exact)

    return holds


def whole_number(value: Any) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def flag(value: Any) -> bool:
    """Return whether a value is True or False."""
    return isinstance(value, bool)


def _thresholds(value: Any) -> bool:
    numbers = [number(each) for each in value] if isinstance(value, tuple | list) else []
    if len(numbers) != 2:
        return False
    first, second = numbers
    return first is not None and second is not None and 0 <= second <= first


def _interval(value: Any) -> bool:
    if isinstance(value, Mapping):
        schedule_of(value)  # raises the error of its kind
        return True
    return callable(value) or whole_number(value)


def _one_of(*values: str) -> tuple[Callable[[Any], bool], str, str]:
    return lambda v: v in values, f"one of {values}", f"use {values[0]!r}, the default"


def _patterns(value: Any) -> bool:
    several = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return value is None or isinstance(value, str) or callable(value) or several


def _betas(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_share, value))


def _mask(value: Any) -> bool:
    return value is None or (
        isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() > 0
    )


def _count(value: Any) -> bool:
    return number(value) is not None and float(value).is_integer() and value >= 0


def _counter(meaning: str, *, compared: bool = True) -> Option:
    return Option(
        _count,
        "a whole number ≥ 0",
        "step() counts it: put it back",
        meaning,
        int,
        default=0,
        scope="counter",
        compared=compared,
    )


_positive = real(lambda v: v > 0)
_not_negative = real(lambda v: v >= 0)
_share = real(lambda v: 0 <= v < 1)
_Chosen = str | tuple[str, ...] | None
_OFF = "0 switches it off"
_LEFT_OUT = "leave it out for {default}"
_UNBOUNDED = "None switches it off"
_PATTERN = "a name, a pattern, or a list of them, such as ['*.weight', '-head']"
OPTIONS: dict[str, Option] = {
    "lr": Option(
        _not_negative,
        "a finite number ≥ 0",
        "start from {default}",
        "learning rate; null: thor-muon finds it from the weights",
        float,
    ),
    "auto_lr": Option(
        flag,
        "True or False",
        "True takes smaller steps with weights that are trained already, False lr for all",
        "whether lr was found and not given",
        default=False,
    ),
    "damping": Option(
        _positive,
        "a finite number > 0",
        "it keeps the factors invertible: start from {default}, and schedule it down, not to zero",
        "λ, added to the diagonal of the factors; see damping_schedule",
        float,
    ),
    "momentum": Option(
        _share,
        "in [0, 1)",
        "{default} is usual, 0 switches it off",
        "μ; 0 switches momentum off",
        float,
        default=0.0,
    ),
    "nesterov": Option(flag, "True or False", _LEFT_OUT, "Nesterov's momentum", bool, False),
    "dampening": Option(
        real(lambda v: 0 <= v <= 1), "in [0, 1]", _OFF, "τ in v ← μ v + (1 − τ) d", float, 0.0
    ),
    "dampen_first": Option(
        flag, "True or False", _LEFT_OUT, "dampen the first step too", bool, False
    ),
    "betas": Option(
        _betas,
        "a pair (β1, β2) of numbers in [0, 1)",
        "use {default}",
        "weights of the old values in the running averages of the gradient and of its square",
    ),
    "eps": Option(
        _positive,
        "a finite number > 0",
        "{default} is the paper's",
        "term that keeps a denominator away from 0",
        float,
    ),
    "weight_decay": Option(
        _not_negative,
        "a finite number ≥ 0",
        _OFF,
        "coefficient of the weight decay, in the optimizer's own form",
        float,
        default=0.0,
    ),
    "update_interval": Option(
        _interval,
        "a whole number of steps ≥ 1, or a schedule of torch_thor.intervals",
        "1 refreshes every step; start from {default}",
        "steps between refreshes, or {kind: constant, piecewise or geometric, ...} of "
        "torch_thor.intervals",
        int | dict[str, Any],
        default=100,
        compared=False,  # it may be a function, so what it returns is compared
    ),
    "trace_thresholds": Option(
        _thresholds,
        "a pair (ω1, ω2) of numbers with 0 ≤ ω2 ≤ ω1: above ω1 a layer updates, below ω2 it stops",
        "the paper's THOR is (0.01, 0.0)",
        "(ω1, ω2) of the trace rule, or thor, thor_stop, thor_nt",
        tuple[float, float],
        default=(0.01, 0.0),
    ),
    "split_dim": Option(
        lambda v: v is None or whole_number(v),
        "a whole number ≥ 1, or None for unsplit factors",
        "use 128, the paper's choice for ResNet-50, or choose_split_dim(model, batch).split_dim",
        "block size of the factors; null: whole ones; auto measures it at the start",
        int | None,
        default=128,
    ),
    "factor_decay": Option(
        _share,
        "in [0, 1)",
        "0 takes the latest factors only",
        "weight of the old value in a running average of the factors; 0: the latest only",
        float,
        default=0.0,
    ),
    "max_update_ratio": Option(
        lambda v: v is None or _positive(v),
        "None or a number > 0",
        _UNBOUNDED,
        "largest step of a parameter relative to its norm; null: no bound",
        float | None,
    ),
    "kl_clip": Option(
        lambda v: v is None or _positive(v),
        "None or a number > 0",
        _UNBOUNDED,
        "bound κ on the squared step in the Fisher norm, in the place of max_update_ratio",
        float | None,
    ),
    "clip_factor": Option(
        lambda v: (number(v) or 0) > 0,
        "a number > 0",
        "start from 0.01; float('inf') never clips",
        "largest ratio of gradient to weight of a unit",
        float,
    ),
    "maximize": Option(
        flag, "True or False", _LEFT_OUT, "maximise the objective instead of minimising it"
    ),
    "foreach": Option(
        lambda v: v is None or flag(v),
        "None, True or False",
        _LEFT_OUT,
        "whether tensors are handled in batches",
    ),
    "step": _counter("steps taken"),
    "next_refresh": _counter("the next step that refreshes"),
    "last_loss_terms": _counter("N of the latest refresh", compared=False),
    "layers": Option(
        _patterns,
        _PATTERN,
        "a leading minus leaves layers out",
        "layers whose curvature is used, by name or pattern; a leading minus leaves out",
        _Chosen,
        scope="optimizer",
    ),
    "exclude": Option(
        _patterns,
        _PATTERN,
        "a leading minus keeps parameters",
        "parameters that are treated as biases are; null: biases and norms",
        _Chosen,
        scope="optimizer",
    ),
    "loss_reduction": Option(
        *_one_of("mean", "sum"),
        "whether the loss is the mean of its terms or their sum",
        default="mean",
        scope="optimizer",
    ),
    "fisher": Option(
        *_one_of("empirical", "sampled"),
        "labels of the statistics: those of the loss, or drawn ones",
        Literal["empirical", "sampled"],
        default="empirical",
        scope="optimizer",
    ),
    "distributed": Option(
        lambda v: v is None or isinstance(v, Distributed),
        "a torch_thor.Distributed, or None for its defaults",
        "leave it out for the processes of the default group",
        "how to train with other processes",
        scope="optimizer",
        error=TypeError,
    ),
    "nonfinite": Option(
        *_one_of("raise", "skip"),
        "what happens if a gradient holds NaN or inf",
        default="raise",
        scope="attribute",
    ),
    "loss_terms": Option(
        lambda v: v is None or callable(v) or whole_number(v),
        "a whole number ≥ 1, the terms that the loss of one step averages over",
        "None takes the leading dimension of the batch",
        "N, or a callable that returns it",
        scope="attribute",
    ),
    "row_mask": Option(
        _mask,
        "a bool tensor (N, L), True for the rows that count, or None",
        "use attention_mask.bool()",
        "the rows of sequences that count",
        scope="attribute",
    ),
}


def scoped(*scopes: Scope) -> tuple[str, ...]:
    """Return the names of all options of some scopes."""
    return tuple(name for name, option in OPTIONS.items() if option.scope in scopes)


COUNTERS = {name: OPTIONS[name].default for name in scoped("counter")}


def check(optimizer: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value that the rule of its option refuses, if there is one."""
    for name, value in values.items():
        option = OPTIONS.get(name)
        if option is None:
            continue
        # a mask of one row is no number
        is_mask = option.test is _mask and isinstance(value, torch.Tensor)
        try:
            holds = option.test(value if is_mask else as_interval(value))
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from error
        if not holds:
            remedy = option.remedy.format(default=default_of(optimizer, name))
            what = f"{value.dtype} {tuple(value.shape)}" if is_mask else repr(value)
            raise option.error(f"{name}={what}: {name} must be {option.rule}; {remedy}")


def options_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of its options that stand in parameter groups, and of counters there."""
    return [name for name in optimizer.defaults if name in OPTIONS]


def check_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of an optimizer that is out of range in a group."""
    # trainers leave options of other optimizers in groups
    check(type(optimizer), {k: group[k] for k in options_of(optimizer) if k in group})


class OptionGroup(dict[str, Any]):
    """A parameter group whose values are plain, whoever sets them.

    So a checkpoint into which a trainer puts the group itself can be loaded, also without this
    package: it is saved as a dict. An option that the optimizer does not have is read as declared.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        super().__init__()
        self.update(group)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value if key == "params" else as_interval(value))

    def __missing__(self, key: str) -> Any:
        return OPTIONS[key].default

    update = MutableMapping.update

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which is set first if it is not there."""
        if key not in self:
            self[key] = default
        return self[key]

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
    return OPTIONS[name].default


def options_in(arguments: Mapping[str, Any]) -> OptionGroup:
    """Return the options of a parameter group among the arguments of a constructor."""
    names = scoped("group")
    return OptionGroup({name: arguments[name] for name in arguments if name in names})


def check_complete(
    optimizer: type, index: int, group: Mapping[str, Any], required: Collection[str]
) -> None:
    """Raise ValueError for an option that a parameter group lacks."""
    if missing := [name for name in required if name not in group]:
        raise ValueError(
            f"parameter group {index} has no {missing[0]!r} any more: every option must stand in "
            f"each group; put it back ({default_of(optimizer, missing[0])!r} is its default)"
        )
