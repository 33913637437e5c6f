"""The settings of THOR in a recipe, among them those that may be of more than one type."""

from dataclasses import asdict, fields
from typing import Any

from torch_thor.optim import THOR
from torch_thor.optim.checks import check_interval
from torch_thor.optim.thor import intervals
from torch_thor.optim.thor.options import FISHERS, PRESETS, SCALED_DEFAULTS, check_thresholds
from torch_thor.training.errors import UserError, require
from torch_thor.training.optimizers.settings import OptimizerSettings, settings_of

MEANINGS = {
    "update_interval": "Steps between refreshes of the curvature: a number, or a mapping with `kind` (`constant`, "
    "`piecewise`, `geometric`) and the arguments of that class of `torch_thor.intervals`.",
    "trace_thresholds": "(ω1, ω2) of the trace rule, or the name of one of `THOR.preset`'s settings.",
    "kl_clip": "Limit on the step's length in the Fisher norm. `auto` leaves the bound to `max_update_ratio`, `None` "
    "is the paper's unbounded step.",
    "max_update_ratio": "Longest step of a parameter, before momentum, as a share of the parameter's norm; `auto` is "
    "0.01 where `kl_clip` is `auto`, else none. `None` is no limit.",
    "skip": 'Layers to leave to SGD with momentum, by name or pattern: `[head, "*norm*"]`.',
    "decay_filter": "Parameters that decay, a pattern or a list of them; a minus in front leaves out: `-*norm*`, "
    '`["*.weight", -head]`. `None` is all.',
}
TYPES = {
    "update_interval": Any, "trace_thresholds": Any, "decay_filter": Any, "split_dim": int | str | None,
    "kl_clip": float | str | None, "max_update_ratio": float | str | None, "skip": tuple[str, ...],
}  # fmt: skip
# What a recipe has no word for: the application knows it, or it is no matter of settings
NO_KEYS = ("loss_reduction", "scaling", "loss_terms", "only", "nonfinite", "grad_scaler", "process_group")


def _check(settings: Any) -> None:
    for name in ("trace_thresholds", "decay_filter"):  # lists, as YAML has them
        if isinstance(getattr(settings, name), list):
            object.__setattr__(settings, name, tuple(getattr(settings, name)))
    interval_of(settings.update_interval)
    thresholds_of(settings.trace_thresholds)
    require(settings.fisher in FISHERS, f"fisher={settings.fisher} must be one of {', '.join(FISHERS)}")


def _settings(name: str, scaling: str | None) -> type[OptimizerSettings]:
    usual = {
        key: value for key, value in SCALED_DEFAULTS[scaling].items() if key not in ("kl_clip", "max_update_ratio")
    }
    if isinstance(usual["update_interval"], intervals.Geometric):
        usual["update_interval"] = {"kind": "geometric", **asdict(usual["update_interval"])}
    return settings_of(
        name,
        THOR,
        module=__name__,
        without=NO_KEYS,
        rules=(),
        check=_check,
        types=TYPES,
        meanings=MEANINGS,
        defaults={**usual, "skip": ()},
    )


INTERVALS: dict[str, type[intervals.Constant | intervals.Piecewise | intervals.Geometric]] = {
    "constant": intervals.Constant,
    "piecewise": intervals.Piecewise,
    "geometric": intervals.Geometric,
}


def interval_of(value: Any) -> Any:
    """Build the interval that a recipe describes.

    Args:
        value: A number of steps, or a mapping with `kind` and the arguments of a schedule.

    Returns:
        What `THOR` takes as `update_interval`.

    Raises:
        UserError: If it is neither, or the schedule refuses its arguments.
    """
    if not isinstance(value, dict):
        try:
            return check_interval("update_interval", value)
        except ValueError as error:
            raise UserError(f"{error}; a schedule is a mapping such as {EXAMPLE}") from error
    arguments = {str(key): item for key, item in value.items() if key != "kind"}
    kind = str(value.get("kind"))
    require(
        kind in INTERVALS,
        f"update_interval.kind={kind} is not a schedule: use one of {', '.join(INTERVALS)}, as in {EXAMPLE}",
    )
    try:
        return INTERVALS[kind](**arguments)
    except TypeError as error:  # arguments that it does not have, or lacks
        known = ", ".join(item.name for item in fields(INTERVALS[kind]))
        raise UserError(f"update_interval: {kind} takes {known}, not {', '.join(arguments) or 'nothing'}") from error
    except ValueError as error:
        raise UserError(f"update_interval: {error}") from error


EXAMPLE = "{kind: geometric, first: 5, last: 100, factor: 1.5}"


def thresholds_of(value: Any) -> Any:
    """Look up the thresholds that a recipe names.

    Args:
        value: The name of a preset, or the thresholds themselves.

    Returns:
        What `THOR` takes as `trace_thresholds`.

    Raises:
        UserError: If there is no such preset, or they are no pair ω1 ≥ ω2 ≥ 0.
    """
    if isinstance(value, str):
        return _named_thresholds(value)
    try:
        return check_thresholds(value)
    except ValueError as error:
        raise UserError(str(error)) from error


def _named_thresholds(name: str) -> Any:
    of_the_rule = {key: preset for key, preset in PRESETS.items() if preset.keys() == {"trace_thresholds"}}
    if name not in of_the_rule:
        # "paper" is more than thresholds: a recipe that names it here would stay bounded
        what = "sets other options too (write kl_clip=null)" if name in PRESETS else "is not known"
        raise UserError(f"trace_thresholds: preset {name!r} {what}; use one of {', '.join(map(repr, of_the_rule))}")
    return of_the_rule[name]["trace_thresholds"]


THORSettings = _settings("THORSettings", None)
SpectralSettings = _settings("SpectralSettings", "spectral")
