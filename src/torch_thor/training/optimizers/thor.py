"""The settings of THOR in a recipe, and what is built from those that may be of more than one type."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch_thor.optim import intervals
from torch_thor.optim.checks import check_interval
from torch_thor.optim.options import AUTO, FISHERS, PRESETS, SCALED_DEFAULTS, check_thresholds
from torch_thor.training.errors import UserError, require
from torch_thor.training.optimizers.settings import OptimizerSettings

_SPECTRAL = SCALED_DEFAULTS["spectral"]


@dataclass(frozen=True)
class THORSettings(OptimizerSettings):
    """`THOR`; the names are its own.

    Args:
        damping: Added to the Fisher matrix.
        momentum: Momentum.
        nesterov: Whether it is Nesterov's.
        update_interval: Steps between refreshes of the curvature: a number, or a mapping with `kind` (`constant`,
            `piecewise`, `geometric`) and the arguments of that class of `torch_thor.intervals`.
        trace_thresholds: (ω1, ω2) of the trace rule, or the name of one of `THOR.preset`'s settings.
        split_dim: Size of the blocks that factors are split into; `None` leaves them whole, `auto` measures.
        factor_decay: Decay of the running average of the factors.
        kl_clip: Limit on the step's length in the Fisher norm. `auto` leaves the bound to `max_update_ratio`, `None` is
            the paper's unbounded step.
        max_update_ratio: Longest step of a parameter, before momentum, as a share of the parameter's norm; `auto` is
            0.01 where `kl_clip` is `auto`, else none. `None` is no limit.
        fisher: Whose labels the curvature comes from: `empirical` is those of the training loss, `sampled` those drawn
            from the network's own predictions.
        skip: Layers to leave to SGD with momentum, by name or pattern: `[head, "*norm*"]`.
        decay_filter: Parameters that decay, a pattern or a list of them; a minus in front leaves out: `-*norm*`,
            `["*.weight", -head]`. `None` is all.
    """

    lr: float = 0.05
    damping: float = 0.03
    momentum: float = 0.9
    nesterov: bool = False
    update_interval: Any = 100
    trace_thresholds: Any = (0.01, 0.0)
    split_dim: int | str | None = 128
    factor_decay: float = 0.0
    kl_clip: float | str | None = AUTO
    max_update_ratio: float | str | None = AUTO
    fisher: str = "empirical"
    skip: tuple[str, ...] = ()
    decay_filter: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.trace_thresholds, list):  # as YAML has it
            object.__setattr__(self, "trace_thresholds", tuple(self.trace_thresholds))
        if isinstance(self.decay_filter, list):
            object.__setattr__(self, "decay_filter", tuple(self.decay_filter))
        interval_of(self.update_interval)
        thresholds_of(self.trace_thresholds)
        require(self.fisher in FISHERS, f"fisher={self.fisher} must be one of {', '.join(FISHERS)}")


@dataclass(frozen=True)
class SpectralSettings(THORSettings):
    """`THOR` with `scaling="spectral"`: `damping` is relative to A; `split_dim` also cuts what is orthogonalised."""

    lr: float = _SPECTRAL["lr"]
    damping: float = _SPECTRAL["damping"]
    momentum: float = _SPECTRAL["momentum"]
    nesterov: bool = _SPECTRAL["nesterov"]
    update_interval: Any = field(default_factory=lambda: {"kind": "geometric", **asdict(_SPECTRAL["update_interval"])})
    factor_decay: float = _SPECTRAL["factor_decay"]


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
        f"update_interval.kind={kind} is no schedule: use one of {', '.join(INTERVALS)}, as in {EXAMPLE}",
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
