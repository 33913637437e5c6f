"""The settings of THOR and ThorMuon in a recipe; some of them may be of more than one type."""

from dataclasses import asdict, fields
from typing import Any

from torch import nn

from torch_thor import intervals
from torch_thor.capture.patterns import selected
from torch_thor.distributed.processes import Distributed
from torch_thor.optim import THOR, ThorMuon
from torch_thor.optim.options import OPTIONS, check
from torch_thor.optim.thor import PRESETS
from torch_thor.training.errors import UserError, require
from torch_thor.training.optimizers.settings import OptimizerSettings, settings_dict, settings_of

BOTH = {
    "momentum": "Momentum factor μ in [0, 1); 0 switches momentum off.",
    "nesterov": "Whether momentum is Nesterov's: the step then goes along d + μ v instead of v.",
    "decay_filter": "The parameters to which weight decay applies: a pattern of names, or a list of patterns. A "
    'leading minus excludes: `-*norm*`, `["*.weight", -head]`. `None` stands for all parameters.',
    "update_interval": "Steps between refreshes of the curvature: a number, or a mapping with `kind` (`constant`, "
    "`piecewise`, `geometric`) and the arguments of that class of `torch_thor.intervals`.",
    "layers": "The layers whose curvature is used, by name or pattern; a leading minus leaves out: `[-head, "
    '"-*norm*"]`. `None` stands for all.',
    "divide_curvature": "Whether each block of a factor and its inverse stay with the process that inverts it (1 / n "
    "of the memory), and every step collects the inverses.",
}
MEANINGS: dict[type, dict[str, str]] = {
    THOR: {
        **BOTH,
        "lr": "Learning rate, above 0. The length of a natural-gradient step depends on lr and damping together, so a "
        "learning rate of SGD does not transfer.",
        "weight_decay": "Coefficient of the weight decay, added to the natural gradient as weight_decay · W.",
        "damping": "λ > 0; √(λ/T) is added to the diagonal of both Kronecker factors, where T is the number of rows "
        "per loss term. `damping_schedule` changes it during the training.",
        "trace_thresholds": "Thresholds (ω1, ω2) of the trace rule, or the name of a preset that sets them (`thor`, "
        "`thor_stop`, `thor_nt`). On a refresh, a layer whose trace changed by more than ω1 takes new factors; a layer "
        "whose trace changed by less than ω2 is never refreshed again; otherwise a layer keeps its factors.",
        "split_dim": "Block size of the factors; `None` uses full factors, and `auto` measures the best size for this "
        "model and device before the first step.",
        "factor_decay": "Weight of the old factors in a running average; 0, as in the paper, uses the latest only.",
        "kl_clip": "Upper bound κ on the squared length of a step in the Fisher norm, in the place of "
        "`max_update_ratio`. `None` sets none.",
        "max_update_ratio": "Largest ratio of the length of a parameter's step, before momentum, to the norm of the "
        "parameter. `None`, as in the paper, sets no bound.",
        "fisher": "The labels that the statistics use: `empirical`, those of the training loss; or `sampled`, labels "
        "drawn from the predictions of the network.",
    },
    ThorMuon: {
        **BOTH,
        "lr": "Learning rate, above 0. It determines the length of a step, and has the same meaning for every layer.",
        "weight_decay": "Coefficient of the decoupled weight decay: each step multiplies a weight by "
        "1 - lr · weight_decay.",
        "damping": "λ > 0, relative to the mean diagonal of the factor A of the layer's inputs: λ tr(A)/d_in is added "
        "to the diagonal of A. `damping_schedule` changes it during the training.",
        "split_dim": "Block size of the factor A, and the number of rows that are orthogonalised together; `None` uses "
        "full matrices, and `auto` measures the best size for this model and device before the first step.",
        "factor_decay": "Weight of the old factor A in a running average; 0 uses the latest only.",
        "max_update_ratio": "Largest ratio of the length of a matrix's step to the norm of the matrix. `None` sets no "
        "bound.",
    },
}
TYPES = {
    "update_interval": Any, "trace_thresholds": Any, "decay_filter": Any, "split_dim": int | str | None,
    "layers": Any, "divide_curvature": bool, "max_update_ratio": float | None,
}  # fmt: skip


def _check(settings: Any) -> None:
    for name in ("trace_thresholds", "decay_filter", "layers"):  # lists, as YAML has them
        if isinstance(getattr(settings, name, None), list):
            object.__setattr__(settings, name, tuple(getattr(settings, name)))
    interval_of(settings.update_interval)
    if hasattr(settings, "trace_thresholds"):
        thresholds_of(settings.trace_thresholds)
        require(OPTIONS["fisher"].test(settings.fisher), f"fisher={settings.fisher} must be empirical or sampled")


def _settings(name: str, optimizer: type) -> type[OptimizerSettings]:
    # what the application sets from other keys of a recipe; its own keys are added
    own: dict[str, Any] = {"decay_filter": None, "divide_curvature": False}
    if optimizer is ThorMuon:
        own["update_interval"] = {"kind": "geometric", **asdict(intervals.Geometric(1, 50, factor=1.5))}
    return settings_of(
        name,
        optimizer,
        module=__name__,
        without=("loss_reduction", "distributed"),
        rules=(),
        check=_check,
        types=TYPES,
        meanings=MEANINGS[optimizer],
        defaults=own,
    )


def build(optimizer: Any, model: nn.Module, settings: Any) -> Any:
    """Build THOR or ThorMuon for all parameters of a model.

    Args:
        optimizer: The class.
        model: The network.
        settings: An object of its settings class.

    Returns:
        The optimizer.

    Raises:
        UserError: If it refuses the settings.
    """
    options = settings_dict(settings)
    decayed, divided = options.pop("decay_filter"), options.pop("divide_curvature")
    options["update_interval"] = interval_of(settings.update_interval)
    if "trace_thresholds" in options:
        options["trace_thresholds"] = thresholds_of(settings.trace_thresholds)
    options["layers"] = options["layers"] or None
    try:
        params: Any = model.parameters()
        if decayed is not None:
            named = dict(model.named_parameters())
            chosen = selected("decay_filter", decayed, named, "parameter")
            rest = {"params": [p for name, p in named.items() if name not in chosen], "weight_decay": 0.0}
            params = [{"params": [p for name, p in named.items() if name in chosen]}, rest]
        return optimizer(params, model=model, distributed=Distributed(divide_curvature=divided), **options)
    except (TypeError, ValueError) as error:  # a pattern that matches no layer of this network
        raise UserError(str(error)) from error


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
        check(THOR, {"trace_thresholds": value})
    except ValueError as error:
        raise UserError(str(error)) from error
    return float(value[0]), float(value[1])


def _named_thresholds(name: str) -> Any:
    presets = {key: preset for key, preset in PRESETS.items() if preset.keys() == {"trace_thresholds"}}
    if name not in presets:
        # the preset "paper" sets max_update_ratio too, which naming it here would not do
        what = "sets other options too (write max_update_ratio=null)" if name in PRESETS else "is not known"
        raise UserError(f"trace_thresholds: preset {name!r} {what}; use one of {', '.join(map(repr, presets))}")
    return presets[name]["trace_thresholds"]


THORSettings = _settings("THORSettings", THOR)
ThorMuonSettings = _settings("ThorMuonSettings", ThorMuon)
