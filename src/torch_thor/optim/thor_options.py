"""The options of THOR: their defaults, the presets, and checks of their values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_thor.intervals import Geometric, check_interval
from torch_thor.optim.checks import in_range, number, require, whole

FISHERS = ("empirical", "sampled")  # the labels of the statistics: those of the loss, or drawn from predictions
AUTO = "auto"  # kl_clip or max_update_ratio is not given, see with_defaults

# "paper" is the step of the paper, without a bound; the others are the three settings of (ω1, ω2) in the paper.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"trace_thresholds": (0.01, 0.0), "kl_clip": None, "max_update_ratio": None},
    "thor": {"trace_thresholds": (0.01, 0.0)},
    "thor_stop": {"trace_thresholds": (0.01, 0.001)},
    "thor_nt": {"trace_thresholds": (0.0, 0.0)},
}


def preset_options(name: str) -> dict[str, Any]:
    """Return the options of a named setting."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is not known; use one of {', '.join(map(repr, PRESETS))}")
    return dict(PRESETS[name])


# The default of each option, which None stands for, by ``scaling``.
SCALED_DEFAULTS: dict[str | None, dict[str, Any]] = {
    None: {
        "lr": 0.05,
        "damping": 0.03,
        "momentum": 0.9,
        "nesterov": False,
        "update_interval": 100,
        "factor_decay": 0.0,
        "max_update_ratio": 0.01,
    },
    "spectral": {
        "lr": 0.08,
        "damping": 0.1,
        "momentum": 0.8,
        "nesterov": True,
        # factors change fastest at first: they are refreshed in every step at first, and every 50 from step 98 on
        "update_interval": Geometric(1, 50, factor=1.5),
        "factor_decay": 0.5,
        "max_update_ratio": 0.15,
    },
}


def with_defaults(given: Mapping[str, Any], scaling: str | None) -> dict[str, Any]:
    """Fill in the defaults of the options that were not given."""
    usual = SCALED_DEFAULTS[scaling]
    given = dict(given)
    if given["max_update_ratio"] == AUTO:
        given["max_update_ratio"] = usual["max_update_ratio"] if given["kl_clip"] == AUTO else None
    if given["kl_clip"] == AUTO:
        given["kl_clip"] = None
    bounds = {key: given[key] for key in ("kl_clip", "max_update_ratio")}
    filled = {key: usual.get(key) if value is None else value for key, value in given.items()} | bounds
    if given["nesterov"] is None and not filled["momentum"]:
        filled["nesterov"] = False
    return filled


def check_scaling(groups: Sequence[Mapping[str, Any]], scaling: str | None) -> None:
    """Check that parameter groups have the scaling of their optimizer."""
    for group in groups:
        require(
            "scaling",
            group["scaling"],
            group["scaling"] == scaling,
            f"{scaling!r} in every parameter group, as the optimizer was made",
            "the stored factors depend on it: make another optimizer",
        )


def check_group(group: Mapping[str, Any]) -> None:
    """Check every option of a parameter group."""
    usual = SCALED_DEFAULTS["spectral" if group["scaling"] else None]  # the numbers that the messages recommend
    in_range("lr", group["lr"], lambda v: v >= 0, "a finite number ≥ 0", f"start from {usual['lr']}")
    in_range(
        "damping",
        group["damping"],
        lambda v: v > 0,
        "a finite number > 0",
        f"it keeps the factors invertible: start from {usual['damping']}, and schedule it down, not to zero",
    )
    switch_off = f"{usual['momentum']} is usual, 0 switches it off"
    in_range("momentum", group["momentum"], lambda v: 0 <= v < 1, "in [0, 1)", switch_off)
    in_range("weight_decay", group["weight_decay"], lambda v: v >= 0, "a finite number ≥ 0", "0 switches it off")
    in_range(
        "factor_decay",
        group["factor_decay"],
        lambda v: 0 <= v < 1,
        "in [0, 1)",
        "0 takes the latest factors only",
    )
    nesterov, momentum = group["nesterov"], number(group["momentum"])
    require("nesterov", nesterov, isinstance(nesterov, bool), "True or False", f"leave it out for {usual['nesterov']}")
    require(
        "nesterov",
        nesterov,
        not (nesterov and momentum == 0),
        "False where momentum is 0",
        "give a momentum > 0",
    )
    in_range(
        "loss_scale", group["loss_scale"], lambda v: v > 0, "a finite number > 0", "1.0 takes gradients as they are"
    )
    for bound in ("kl_clip", "max_update_ratio"):
        if group[bound] is None:
            continue
        in_range(bound, group[bound], lambda v: v > 0, "None or a number > 0", "None switches it off")
        require(
            bound,
            group[bound],
            bound == "max_update_ratio" or group["scaling"] is None,
            "None with scaling='spectral', whose step does not depend on the length of the gradient",
            "use max_update_ratio",
        )
    split_dim = group["split_dim"]
    require(
        "split_dim",
        split_dim,
        split_dim is None or split_dim == "auto" or (whole(split_dim) and split_dim >= 1),
        'a whole number ≥ 1, None for unsplit factors, or "auto"',
        "use 128, the paper's choice for ResNet-50",
    )
    interval = group["update_interval"]
    if not callable(interval):
        check_interval("update_interval", interval)
    check_thresholds(group["trace_thresholds"])


def check_thresholds(thresholds: Any) -> tuple[float, float]:
    """Check the thresholds of the trace rule."""
    pair = isinstance(thresholds, tuple | list) and len(thresholds) == 2
    numbers = [number(t) for t in thresholds] if pair else []
    require(
        "trace_thresholds",
        thresholds,
        pair and all(n is not None and n >= 0 for n in numbers),
        "a pair (ω1, ω2) of numbers ≥ 0",
        "the paper's THOR is (0.01, 0.0)",
    )
    upper, lower = (float(t) for t in thresholds)
    require(
        "trace_thresholds",
        thresholds,
        lower <= upper,
        "(ω1, ω2) with ω2 ≤ ω1: above ω1 a layer updates, below ω2 it stops",
        f"did you mean {(lower, upper)}?",
    )
    return upper, lower


def check_loss_terms(value: Any) -> int:
    """Check a number of loss terms, given by the user or returned by the user's callable."""
    is_count = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point()
    require(
        "loss_terms",
        value,
        (is_count or whole(value)) and value >= 1,
        "a whole number ≥ 1, the terms that the loss of one step averages over",
        "None takes the leading dimension of the batch",
    )
    return int(value)


def check_communication_dtype(value: Any) -> None:
    """Check the option ``communication_dtype``."""
    known = (None, torch.bfloat16, torch.float32)
    rule = "None, torch.bfloat16 or torch.float32"
    require("communication_dtype", value, value in known, rule, "sums of factors overflow in float16")


def check_division(whole_matrices: Any, divide_curvature: Any, scaling: str | None) -> None:
    """Check the options ``whole_matrices`` and ``divide_curvature``."""
    for name, value in (("divide_curvature", divide_curvature), ("whole_matrices", whole_matrices)):
        require(name, value, isinstance(value, bool), "True or False", "leave it out for False")
    spectral = "False unless scaling='spectral', because no other step orthogonalises matrices"
    require("whole_matrices", whole_matrices, not whole_matrices or scaling == "spectral", spectral, "leave it out")


def check_optimizer(*, loss_reduction: Any, nonfinite: Any, scaling: Any, fisher: Any, loss_terms: Any) -> None:
    """Check the options that are not part of parameter groups."""
    named = (
        ("loss_reduction", loss_reduction, ("mean", "sum")),
        ("nonfinite", nonfinite, ("raise", "skip")),
        ("fisher", fisher, FISHERS),
    )
    for name, value, known in named:
        require(name, value, value in known, f"one of {known}", f"use {known[0]!r}, the default")
    require(
        "scaling",
        scaling,
        scaling is None or scaling == "spectral",
        "None or 'spectral'",
        "None is THOR's own step length, 'spectral' the scale-free one",
    )
    require(
        "fisher",
        fisher,
        not (fisher == "sampled" and scaling == "spectral"),
        "'empirical' with scaling='spectral', which uses the inputs of layers alone and no labels",
        "leave it out",
    )
    if loss_terms is not None and not callable(loss_terms):
        check_loss_terms(loss_terms)
