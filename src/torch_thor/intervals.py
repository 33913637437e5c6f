"""Schedules of refreshes.

They are passed as ``THOR(model, update_interval=intervals.Geometric(10, 500, factor=1.2))``.

A schedule is a callable from the step of a refresh, counted from 0, to the number of steps until
the next refresh. The schedules here depend on the step alone, so a resumed run continues the
schedule. Parameter groups and checkpoints hold them as dicts, as recipes have them: ``{"kind":
"geometric", "first": 10, "last": 500, "factor": 1.2}``, which can be passed too. So can any other
callable, but state dicts do not contain it.

Each parameter group counts its own steps, and stores the counts in the group itself, so that every
checkpoint contains them: ``group["step"]`` is the number of steps taken, ``group["next_refresh"]``
is the step of the next refresh, and ``group["update_interval"]`` (a number, an :class:`Interval` or
any other callable) gives the steps from one refresh to the next.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch_thor.errors import explaining, require
from torch_thor.plain import plain

UpdateInterval = int | Callable[[int], int] | Mapping[str, Any]


class Schedule(Protocol):
    """The interface of the schedules in this module."""

    def __call__(self, step: int) -> int:
        """Return the interval after a refresh.

        Args:
            step: the step of the refresh, counted from 0.
        """
        ...


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
    steps = plain(value)
    require(
        isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1,
        f"{name}={value!r}: {name} must be a whole number of steps ≥ 1; 1 refreshes every step",
    )
    return int(steps)


def _hold_plain(schedule: Any) -> None:
    """Let a frozen schedule hold the numbers that it was given as numbers of Python."""
    for field in fields(schedule):
        object.__setattr__(schedule, field.name, plain(getattr(schedule, field.name)))


def _number(name: str, value: Any) -> float:
    require(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
        f"{name}={value!r}: {name} must be a finite number, such as 1.5",
    )
    return float(value)


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
        _hold_plain(self)
        check_interval("interval", self.interval)

    def __call__(self, step: int) -> int:
        """Return the interval.

        Args:
            step: not used.

        Returns:
            The number of steps to the next refresh.
        """
        return self.interval


@dataclass(frozen=True)
class Piecewise:
    """A piecewise constant interval: one value up to the first boundary, and so on.

    The next value holds up to the second boundary, and so on.

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
        _hold_plain(self)
        for name in ("boundaries", "intervals"):
            value = getattr(self, name)
            require(
                isinstance(value, list | tuple),
                f"{name}={value!r}: {name} must be a list; one number of it is [{value!r}]",
            )
            object.__setattr__(self, name, tuple(value))
        if self.steps_per_epoch is not None:
            check_interval("steps_per_epoch", self.steps_per_epoch)
        require(
            self.steps_per_epoch is not None or all(isinstance(b, int) for b in self.boundaries),
            f"boundaries={self.boundaries!r}: boundaries must be whole steps; give "
            "steps_per_epoch where they are epochs",
        )
        edges = [0.0, *(_number("a boundary", b) for b in self.boundaries)]
        require(
            all(earlier < later for earlier, later in itertools.pairwise(edges)),
            f"boundaries={self.boundaries!r}: boundaries must be above 0 and rise; sort them",
        )
        for interval in self.intervals:
            check_interval("an interval", interval)
        require(
            len(self.intervals) == len(self.boundaries) + 1,
            f"intervals={self.intervals!r}: there must be one more than there are boundaries "
            f"({len(self.boundaries)}); the first holds from step 0 on",
        )

    def __call__(self, step: int) -> int:
        """Return the interval in force.

        Args:
            step: the step of a refresh.

        Returns:
            Steps to the next refresh.
        """
        # Epochs are multiplied, instead of dividing the step, because a quotient would be rounded.
        return self.intervals[sum(step >= b * (self.steps_per_epoch or 1) for b in self.boundaries)]


@dataclass(frozen=True)
class Geometric:
    """An interval that grows by the same factor on each refresh, from ``first`` to ``last``.

    It is described by Chen et al. 2021, section 3.2.

    If ``last`` is the number of steps in an epoch, it ends at one refresh per epoch, as in the
    paper on ResNet-50. The interval depends on the step alone: intervals k, factor · k, factor² ·
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
        _hold_plain(self)
        check_interval("first", self.first)
        check_interval("last", self.last)
        require(
            self.last >= self.first,
            f"last={self.last!r}: last must be first={self.first!r} or more: the interval grows",
        )
        require(
            _number("factor", self.factor) > 1,
            f"factor={self.factor!r}: factor must be above 1; Constant does not grow",
        )

    def __call__(self, step: int) -> int:
        """Return the interval in force.

        Args:
            step: the step of a refresh.

        Returns:
            Steps to the next refresh.
        """
        # It computes factor · step, and not (factor - 1) · step, because in floating point 1.2 · 5
        # is 6, but (1.2 - 1) · 5 is not 1.
        return math.floor(min(float(self.last), self.first - step + self.factor * step))


# ---- the form that groups, checkpoints and recipes hold ------------------------------------------

KINDS: dict[str, Any] = {"constant": Constant, "piecewise": Piecewise, "geometric": Geometric}


class Interval(dict[str, Any]):
    """A schedule as parameter groups hold it: its ``kind`` and its arguments.

    Its call is that of the schedule. It is saved as a dict, which ``torch.load`` takes without this
    package.
    """

    def __call__(self, step: int) -> int:
        """Return the interval in force.

        Args:
            step: the step of a refresh.

        Returns:
            Steps to the next refresh.

        Raises:
            ValueError: no such schedule exists.
        """
        return int(schedule_of(self)(step))

    def __eq__(self, other: object) -> bool:
        return super().__eq__(as_interval(other))

    def __ne__(self, other: object) -> bool:  # that of dict would not ask __eq__
        return not self == other

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


def schedule_of(interval: Mapping[str, Any]) -> Schedule:
    """Return the schedule that a dict describes.

    Args:
        interval: its ``kind`` (``"constant"``, ``"piecewise"`` or ``"geometric"``), and the
            arguments of its class.

    Raises:
        ValueError: the kind is not known, or an argument is missing, unknown or out of range.
    """
    arguments = {str(key): value for key, value in interval.items() if key != "kind"}
    kind: Any = interval.get("kind")
    require(
        kind in KINDS,
        f"kind must be one of {', '.join(KINDS)}, as in "
        '{"kind": "geometric", "first": 5, "last": 100, "factor": 1.5}',
    )
    with explaining(  # unknown or missing arguments
        TypeError,
        lambda _: (
            f"{kind} takes {', '.join(field.name for field in fields(KINDS[kind]))}, not "
            f"{', '.join(arguments) or 'nothing'}"
        ),
    ):
        schedule: Schedule = KINDS[kind](**arguments)
    return schedule


def as_interval(value: Any) -> Any:
    """Return a schedule as parameter groups hold it, and any other value plain.

    Args:
        value: a schedule, the dict that describes one, or anything else.
    """
    for kind, schedule in KINDS.items():
        if type(value) is schedule:
            value = {"kind": kind, **vars(value)}
    if not (isinstance(value, Mapping) and value.get("kind") in KINDS):
        return plain(value)
    members = {key: plain(member) for key, member in value.items()}
    return Interval({k: [*v] if isinstance(v, tuple) else v for k, v in members.items()})


def steps_until_next(interval: Callable[[int], int], step: int) -> int:
    """Return the number of steps to the next refresh, as a schedule gives it.

    Args:
        interval: a schedule or any callable.
        step: the step of a refresh, counted from 0.

    Returns:
        The number of steps, at least 1.

    Raises:
        ValueError: the callable returns something else.
    """
    return check_interval(f"update_interval({step})", interval(step))
