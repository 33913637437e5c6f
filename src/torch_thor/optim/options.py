"""The options of all optimizers, each declared once: what it means and what its value must be.

Constructors, added parameter groups, loaded state dicts and recipes use this table.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torch_thor.distributed.options import Distributed
from torch_thor.intervals import as_interval


@dataclass(frozen=True)
class Option:
    """What an option means, and what its value must be."""

    test: Callable[[Any], bool]
    rule: str
    meaning: str
    type: Any = None  # in recipes, for options that these have
    default: Any = None  # of optimizers whose constructor does not have it
    scope: Literal["group", "optimizer"] = "group"


def number(value: Any) -> float | None:
    """Return a number or a one-element tensor as a float; None for all else, also for bool."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def real(test: Callable[[float], bool]) -> Callable[[Any], bool]:
    """Return a test for finite numbers."""

    def holds(value: Any) -> bool:
        exact = number(value)
        return exact is not None and math.isfinite(exact) and test(exact)

    return holds


def optional(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a test that None passes too."""
    return lambda value: value is None or test(value)


def whole_number(value: Any) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def flag(value: Any) -> bool:
    """Return whether a value is True or False."""
    return isinstance(value, bool)


def _thresholds(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and 0 <= value[1] <= value[0]


def _interval(value: Any) -> bool:
    return callable(as_interval(value)) or whole_number(value)


def _one_of(*values: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in values, f"one of {values}"


def _patterns(value: Any) -> bool:
    several = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return value is None or isinstance(value, str) or callable(value) or several


def _betas(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_share, value))


_positive, _not_negative = real(lambda v: v > 0), real(lambda v: v >= 0)
_share = real(lambda v: 0 <= v < 1)
_FLAG = flag, "True or False"
_NOT_NEGATIVE = _not_negative, "a finite number ≥ 0"
_POSITIVE = _positive, "a finite number > 0"
_SHARE = _share, "in [0, 1)"
_BOUND = optional(_positive), "None or a number > 0"
_SELECTION = _patterns, "a name, a pattern, or a list of them, such as ['*.weight', '-head']"
_Chosen = str | tuple[str, ...] | None

OPTIONS: dict[str, Option] = {
    "lr": Option(*_NOT_NEGATIVE, "learning rate; null: thor-muon finds it from the weights", float),
    "auto_lr": Option(*_FLAG, "whether lr was found and not given", default=False),
    "lr_squares": Option(*_NOT_NEGATIVE, "sum of the squares of lr over all steps"),
    "shows_average": Option(*_FLAG, "whether the parameters hold the average of the steps"),
    "trained": Option(
        optional(flag), "None, True or False", "whether the network was trained already"
    ),
    "damping": Option(
        *_POSITIVE, "λ, added to the diagonal of the factors; see damping_schedule", float
    ),
    "momentum": Option(*_SHARE, "μ; 0 switches momentum off", float, 0.0),
    "nesterov": Option(*_FLAG, "Nesterov's momentum", bool, False),
    "dampening": Option(
        real(lambda v: 0 <= v <= 1), "in [0, 1]", "τ in v ← μ v + (1 − τ) d", float, 0.0
    ),
    "dampen_first": Option(*_FLAG, "dampen the first step too", bool, False),
    "betas": Option(
        _betas,
        "a pair (β1, β2) of numbers in [0, 1)",
        "weights of the old values in the running averages of the gradient and of its square",
    ),
    "eps": Option(*_POSITIVE, "term that keeps a denominator away from 0", float),
    "weight_decay": Option(
        *_NOT_NEGATIVE, "coefficient of the weight decay, in the optimizer's own form", float, 0.0
    ),
    "update_interval": Option(
        _interval,
        "a whole number of steps ≥ 1, or a schedule of torch_thor.intervals",
        "steps between refreshes, or {kind: constant, piecewise or geometric, ...} of "
        "torch_thor.intervals",
        int | dict[str, Any],
        100,
    ),
    "trace_thresholds": Option(
        _thresholds,
        "a pair (ω1, ω2) of numbers with 0 ≤ ω2 ≤ ω1: above ω1 a layer updates, below ω2 it stops",
        "(ω1, ω2) of the trace rule, or thor, thor_stop, thor_nt",
        tuple[float, float],
        (0.01, 0.0),
    ),
    "split_dim": Option(
        optional(whole_number),
        "a whole number ≥ 1, or None for unsplit factors",
        "block size of the factors; null: whole factors; auto measures it at the start",
        int | None,
        128,
    ),
    "factor_decay": Option(
        *_SHARE,
        "weight of the old value in a running average of the factors; 0: the latest only",
        float,
        0.0,
    ),
    "max_update_ratio": Option(
        *_BOUND,
        "largest step of a parameter relative to its norm; null: no bound",
        float | None,
    ),
    "kl_clip": Option(
        *_BOUND,
        "bound κ on the squared step in the Fisher norm, in the place of max_update_ratio",
        float | None,
    ),
    "clip_factor": Option(
        lambda v: (number(v) or 0) > 0,
        "a number > 0",
        "largest ratio of gradient to weight of a unit",
        float,
    ),
    "maximize": Option(*_FLAG, "maximise the objective instead of minimising it"),
    "foreach": Option(
        optional(flag), "None, True or False", "whether tensors are handled in batches"
    ),
    "layers": Option(
        *_SELECTION,
        "layers whose curvature is used, by name or pattern; a leading minus leaves out",
        _Chosen,
        scope="optimizer",
    ),
    "anytime": Option(
        *_FLAG, "average the steps, so that no schedule is needed", bool, False, scope="optimizer"
    ),
    "row_splits": Option(
        lambda v: v is None or isinstance(v, Mapping),
        'None or a dict from patterns of layers to numbers of projections, such as {"*.qkv": 3}',
        "layers that compute several projections at once, and how many or their sizes",
        scope="optimizer",
    ),
    "exclude": Option(
        *_SELECTION,
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
        "labels of the statistics: the labels of the loss, or drawn labels",
        Literal["empirical", "sampled"],
        "empirical",
        scope="optimizer",
    ),
    "distributed": Option(
        lambda v: v is None or isinstance(v, Distributed),
        "a torch_thor.Distributed, or None for its defaults",
        "how to train with other processes",
        scope="optimizer",
    ),
}

# Parameter groups hold their counters, so that every checkpoint has them: the steps taken, the step
# of the next refresh, and N of the latest refresh.
COUNTERS = {"step": 0, "next_refresh": 0, "last_loss_terms": 0}

# What users of AdamW, Muon and MindSpore type, and what stands in its place in THOR and ThorMuon.
COUNTERPARTS = {
    "betas": "momentum= is β1, and factor_decay= stands for β2 in the curvature",
    "eps": "damping= stands in its place",
    "amsgrad": "no maximum of second moments is kept",
    "ns_steps": "none is needed, the polar factors are exact on a CPU, and of six rounds elsewhere",
    "fused": "none is needed, the kernels follow from the device",
    "foreach": "none is needed, the kernels follow from the device",
    "frequency": "update_interval= is the number of steps between two refreshes",
    "split_indices": "none is needed, all statistics are sent as one buffer",
}


def scoped(scope: str) -> list[str]:
    """Return the names of all options of a scope."""
    return [name for name, option in OPTIONS.items() if option.scope == scope]


def options_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group among the arguments of a constructor."""
    names = scoped("group")
    return {name: value for name, value in arguments.items() if name in names}


def check(values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value that the rule of its option refuses, if any."""
    for name, value in values.items():
        option = OPTIONS.get(name)
        if option is None:
            continue
        try:
            holds = option.test(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from error
        if not holds:
            raise ValueError(f"{name}={value!r}: {name} must be {option.rule}")
