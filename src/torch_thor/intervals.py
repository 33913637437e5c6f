"""Schedules of refreshes, for the option ``update_interval``.

They are passed as ``THOR(model, update_interval=intervals.Geometric(10, 500, factor=1.2))``.

A schedule is a callable from the step of a refresh, counted from 0, to the number of steps until
the next refresh. The schedules here depend only on the step, so a resumed run continues the
schedule. State dicts and recipes hold them as dicts, which can be passed too: ``{"kind":
"geometric", "first": 10, "last": 500, "factor": 1.2}``. Any other callable can be passed, but state
dicts do not contain it.

Each parameter group counts its own steps, and stores the counts in the group itself, so that every
checkpoint contains them: ``group["step"]`` is the number of steps taken, and
``group["next_refresh"]`` the step of the next refresh.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch_thor.errors import UserError, require

UpdateInterval = int | Callable[[int], int] | Mapping[str, Any]


def check_interval(name: str, value: Any) -> int:
    """Check a number of steps, given by the user or by the user's callable.

    Args:
        name: its name in the message.
        value: the number.

    Returns:
        The number.

    Raises:
        ValueError: it is not a whole number of at least 1.
    """
    require(
        isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        f"{name}={value!r}: {name} must be a whole number of steps ≥ 1; 1 refreshes every step",
    )
    return int(value)


@dataclass(frozen=True)
class Constant:
    """The same interval throughout the training; equivalent to the number itself.

    Args:
        interval: steps between refreshes, at least 1.

    Raises:
        ValueError: the interval is not a whole number of at least 1.
    """

    interval: int

    def __post_init__(self) -> None:
        check_interval("interval", self.interval)

    def __call__(self, step: int) -> int:
        """Return the interval after a refresh at a step."""
        return self.interval


@dataclass(frozen=True)
class Piecewise:
    """A piecewise constant interval: one value up to the first boundary, and so on.

    ``Piecewise([500, 2000], [10, 50, 200])`` refreshes every 10 steps before step 500, every 50
    before step 2000, then every 200; ``Piecewise([1, 5], [50, 200, 834], steps_per_epoch=5004)``
    has its boundaries after epochs 1 and 5. The interval is determined at each refresh, and it may
    extend beyond a boundary.

    Args:
        boundaries: increasing steps above 0; or epochs, which may be fractions, if
            ``steps_per_epoch`` is given. From each boundary on, the next interval is used.
        intervals: steps between refreshes, one more than there are boundaries.
        steps_per_epoch: the number of optimizer steps in one epoch; None if the boundaries are
            steps.

    Raises:
        ValueError: a value is out of range, or the numbers of boundaries and intervals do not fit.
    """

    boundaries: Sequence[float]
    intervals: Sequence[int]
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "intervals", tuple(self.intervals))
        for interval in self.intervals:
            check_interval("an interval", interval)
        if self.steps_per_epoch is not None:
            check_interval("steps_per_epoch", self.steps_per_epoch)
        require(
            all(earlier < later for earlier, later in itertools.pairwise((0, *self.boundaries))),
            f"boundaries={self.boundaries!r}: boundaries must be above 0 and rise; sort them",
        )
        require(
            len(self.intervals) == len(self.boundaries) + 1,
            f"intervals={self.intervals!r}: there must be one more than there are boundaries "
            f"({len(self.boundaries)}); the first holds from step 0 on",
        )

    def __call__(self, step: int) -> int:
        """Return the interval after a refresh at a step."""
        # Epochs are multiplied, instead of dividing the step, because a quotient would be rounded.
        return self.intervals[sum(step >= b * (self.steps_per_epoch or 1) for b in self.boundaries)]


@dataclass(frozen=True)
class Geometric:
    """An interval that grows by the same factor on each refresh, from ``first`` to ``last``.

    It is described by Chen et al. 2021, section 3.2.

    If ``last`` is the number of steps in an epoch, it ends at one refresh per epoch, as in the
    paper on ResNet-50. The interval depends only on the step: intervals k, factor · k, factor² ·
    k, and so on have the closed form ``first + (factor - 1) · step``, which is rounded down and
    bounded by ``last``.

    Args:
        first: the interval after the first step, in steps; at least 1.
        last: the longest interval, in steps; at least ``first``.
        factor: the growth on each refresh, above 1: with 1.2 the interval grows from 10 to 500 in
            22 refreshes, over 2,450 steps.

    Raises:
        ValueError: a value is out of range.
    """

    first: int
    last: int
    factor: float

    def __post_init__(self) -> None:
        check_interval("first", self.first)
        check_interval("last", self.last)
        require(
            self.last >= self.first,
            f"last={self.last!r}: last must be first={self.first!r} or more: the interval grows",
        )
        require(
            1 < self.factor < math.inf,
            f"factor={self.factor!r}: factor must be a number above 1; Constant does not grow",
        )

    def __call__(self, step: int) -> int:
        """Return the interval after a refresh at a step."""
        # It computes factor · step, and not (factor - 1) · step, because in floating point 1.2 · 5
        # is 6, but (1.2 - 1) · 5 is not 1.
        return math.floor(min(float(self.last), self.first - step + self.factor * step))


KINDS: dict[str, Any] = {"constant": Constant, "piecewise": Piecewise, "geometric": Geometric}


def as_interval(value: Any) -> Any:
    """Return the schedule that a dict describes, and any other value as it is.

    Args:
        value: the schedule's ``kind`` (``"constant"``, ``"piecewise"`` or ``"geometric"``) and the
            arguments of its class; or anything else.

    Raises:
        UserError: the kind is not known, or an argument is missing, unknown or out of range.
    """
    if not isinstance(value, Mapping):
        return value
    arguments = dict(value)
    kind = arguments.pop("kind", None)
    require(
        kind in KINDS,
        f"kind must be one of {', '.join(KINDS)}, as in "
        '{"kind": "geometric", "first": 5, "last": 100, "factor": 1.5}',
    )
    try:
        return KINDS[kind](**arguments)
    except TypeError as error:
        names = ", ".join(field.name for field in fields(KINDS[kind]))
        raise UserError(f"{kind} takes {names}, not {', '.join(arguments) or 'nothing'}") from error


CALLABLE = "callable"  # stands for a function in a state dict, which holds none


def as_saved(value: Any) -> Any:
    """Return an interval as state dicts hold it.

    Args:
        value: a number; a schedule, which becomes the dict that describes it; or another callable.
    """
    for kind, schedule in KINDS.items():
        if isinstance(value, schedule):
            members = {k: [*v] if isinstance(v, tuple) else v for k, v in vars(value).items()}
            return {"kind": kind, **members}
    return CALLABLE if callable(value) else value
