"""The settings of THOR in a recipe, for both of its steps; some of them may be of more than one type."""

from dataclasses import asdict, fields
from typing import Any

from torch_thor import intervals
from torch_thor.optim import THOR
from torch_thor.optim.thor_options import FISHERS, PRESETS, SCALED_DEFAULTS, check_thresholds
from torch_thor.training.errors import UserError, require
from torch_thor.training.optimizers.settings import OptimizerSettings, settings_of

BOTH = {
    "momentum": "Momentum factor μ in [0, 1); 0 switches momentum off.",
    "nesterov": "Whether momentum is Nesterov's: the step then goes along d + μ v instead of v.",
    "decay_filter": "The parameters to which weight decay applies: a pattern of names, or a list of patterns. A "
    'leading minus excludes: `-*norm*`, `["*.weight", -head]`. `None` stands for all parameters.',
    "update_interval": "Steps between refreshes of the curvature: a number, or a mapping with `kind` (`constant`, "
    "`piecewise`, `geometric`) and the arguments of that class of `torch_thor.intervals`.",
    "trace_thresholds": "Thresholds (ω1, ω2) of the trace rule, or the name of a preset that sets them (`thor`, "
    "`thor_stop`, `thor_nt`). On a refresh, a layer whose trace changed by more than ω1 takes new factors; a layer "
    "whose trace changed by less than ω2 is never refreshed again; otherwise a layer keeps its factors.",
}
MEANINGS: dict[str | None, dict[str, str]] = {
    None: {
        **BOTH,
        "lr": "Learning rate, above 0. The length of a natural-gradient step depends on lr and damping together, so a "
        "learning rate of SGD does not transfer.",
        "weight_decay": "Coefficient of the weight decay, added to the natural gradient as weight_decay · W.",
        "damping": "λ > 0; √(λ/T) is added to the diagonal of both Kronecker factors, where T is the number of rows "
        "per loss term. `damping_schedule` changes it during the training.",
        "split_dim": "Block size of the factors; `None` uses full factors, and `auto` measures the best size for this "
        "model and device in the first step.",
        "factor_decay": "Weight of the old factors in a running average; 0, as in the paper, uses the latest only.",
        "kl_clip": "Upper bound κ on the squared length of a step in the Fisher norm. `auto` bounds the step with "
        "`max_update_ratio` instead. `None`, as in the paper, sets no bound unless `max_update_ratio` is a number.",
        "max_update_ratio": "Largest ratio of the length of a parameter's step, before momentum, to the norm of the "
        "parameter. `auto` is 0.01 if `kl_clip` is `auto`, and otherwise sets no bound. `None` sets no bound.",
        "fisher": "The labels that the statistics use: `empirical`, those of the training loss; or `sampled`, labels "
        "drawn from the predictions of the network.",
        "skip": 'Layers that SGD with momentum trains instead, by name or pattern: `[head, "*norm*"]`.',
    },
    "spectral": {
        **BOTH,
        "lr": "Learning rate, above 0. It determines the length of a step, and has the same meaning for every layer.",
        "weight_decay": "Coefficient of the decoupled weight decay: each step multiplies a weight by "
        "1 - lr · weight_decay.",
        "damping": "λ > 0, relative to the mean diagonal of the factor A of the layer's inputs: λ tr(A)/d_in is added "
        "to the diagonal of A. `damping_schedule` changes it during the training.",
        "split_dim": "Block size of the factor A, and the number of rows that are orthogonalised together; `None` uses "
        "full matrices, and `auto` measures the best size for this model and device in the first step.",
        "factor_decay": "Weight of the old factor A in a running average; 0 uses the latest only.",
        "kl_clip": "Has no use here, because the length of a step does not depend on that of the gradient: leave it at "
        "`auto` or set `None`.",
        "max_update_ratio": "Largest ratio of the length of a matrix's step to the norm of the matrix. `auto` is 0.15. "
        "`None` sets no bound.",
        "fisher": "Has no use here, because the factor A does not depend on labels: leave it at `empirical`.",
        "skip": 'Layers that AdamW trains instead, by name or pattern: `[head, "*norm*"]`.',
    },
}
TYPES = {
    "update_interval": Any, "trace_thresholds": Any, "decay_filter": Any, "split_dim": int | str | None,
    "kl_clip": float | str | None, "max_update_ratio": float | str | None, "skip": tuple[str, ...],
}  # fmt: skip
# Arguments that have no key in a recipe: the application sets them, or they concern code and not a recipe
NO_KEYS = (
    "loss_reduction",
    "scaling",
    "loss_terms",
    "only",
    "nonfinite",
    "grad_scaler",
    "process_group",
    "whole_matrices",
    "communication_dtype",
)


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
        meanings=MEANINGS[scaling],
        defaults={**usual, "skip": ()},
        summary="Settings of `THOR`." if scaling is None else f'Settings of `THOR` with `scaling="{scaling}"`.',
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
        The argument `update_interval` of `THOR`.

    Raises:
        UserError: If the value is neither, or the schedule refuses its arguments.
    """
    if not isinstance(value, dict):
        try:
            return intervals.check_interval("update_interval", value)
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
    except TypeError as error:  # unknown or missing arguments
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
        The argument `trace_thresholds` of `THOR`.

    Raises:
        UserError: If there is no such preset, or the value is not a pair with ω1 ≥ ω2 ≥ 0.
    """
    if isinstance(value, str):
        return _named_thresholds(value)
    try:
        return check_thresholds(value)
    except ValueError as error:
        raise UserError(str(error)) from error


def _named_thresholds(name: str) -> Any:
    presets = {key: preset for key, preset in PRESETS.items() if preset.keys() == {"trace_thresholds"}}
    if name not in presets:
        # the preset "paper" sets kl_clip too, which naming it here would not do
        what = "sets other options too (write kl_clip=null)" if name in PRESETS else "is not known"
        raise UserError(f"trace_thresholds: preset {name!r} {what}; use one of {', '.join(map(repr, presets))}")
    return presets[name]["trace_thresholds"]


THORSettings = _settings("THORSettings", None)
SpectralSettings = _settings("SpectralSettings", "spectral")
