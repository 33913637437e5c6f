"""When to refresh, as small objects: ``THOR(model, update_interval=intervals.Geometric(10, 500, factor=1.2))``.

A schedule is a callable from the step of a refresh, counted from 0, to the number of steps until the next one. These
depend on the step alone, so that a resumed run has the schedule it would have had, and their repr says all there is to
know: it stands in the state dict, from which :meth:`torch_thor.THOR.load_state_dict` makes the schedule again. Any
function of the step will do as well; it is the program's then, and no checkpoint holds it.

Each parameter group counts its own steps, in the group itself, where every checkpoint sees them: ``group["step"]``
counts the steps taken, ``group["next_refresh"]`` is the step of the next refresh, and ``group["update_interval"]`` (a
number, a schedule or any callable) is asked on each refresh for the steps until the next one.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch_thor.optim.checks import check_interval

UpdateInterval = int | Callable[[int], int]


class Schedule(Protocol):
    """What the classes of this module have in common."""

    def __call__(self, step: int) -> int:
        """Return the interval after a refresh.

        Args:
            step: the step of the refresh, counted from 0.
        """
        ...


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: {name} must be a finite number")
    return value


@dataclass(frozen=True)
class Constant:
    """The same interval all through, as the plain number means it.

    Args:
        interval: steps between refreshes, at least 1.

    Raises:
        ValueError: it is no whole number of at least 1.
    """

    interval: int

    def __post_init__(self) -> None:
        check_interval("interval", self.interval)

    def __call__(self, step: int) -> int:
        """Return the interval.

        Args:
            step: the step of a refresh.

        Returns:
            Steps to the next refresh.
        """
        return self.interval


@dataclass(frozen=True)
class Piecewise:
    """One interval up to the first boundary, the next up to the second, and so on.

    ``Piecewise([500, 2000], [10, 50, 200])`` refreshes every 10 steps before step 500, every 50 before step 2000, then
    every 200; ``Piecewise([1, 5], [50, 200, 834], steps_per_epoch=5004)`` has its boundaries after epochs 1 and 5. The
    interval is the one at the refresh itself: it may reach over a boundary.

    Args:
        boundaries: steps, or epochs (fractions are fine) where ``steps_per_epoch`` is given; above 0 and rising. From
            a boundary on the next interval holds.
        intervals: steps between refreshes, one more than there are boundaries.
        steps_per_epoch: optimizer steps in one epoch; None: boundaries are steps.

    Raises:
        ValueError: a value is out of range, or the numbers of boundaries and intervals do not fit.
    """

    boundaries: Sequence[float]
    intervals: Sequence[int]
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("boundaries", "intervals"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ValueError(f"{name}={value!r}: {name} must be a list; one number of it is [{value!r}]")
            object.__setattr__(self, name, tuple(value))
        if self.steps_per_epoch is not None:
            check_interval("steps_per_epoch", self.steps_per_epoch)
        elif not all(isinstance(b, int) for b in self.boundaries):
            raise ValueError(
                f"boundaries={self.boundaries!r}: boundaries must be whole steps; give steps_per_epoch where they are "
                f"epochs"
            )
        edges = [0.0, *(_number("a boundary", b) for b in self.boundaries)]
        if any(later <= earlier for earlier, later in itertools.pairwise(edges)):
            raise ValueError(f"boundaries={self.boundaries!r}: boundaries must be above 0 and rise")
        for interval in self.intervals:
            check_interval("an interval", interval)
        if len(self.intervals) != len(self.boundaries) + 1:
            raise ValueError(
                f"intervals={self.intervals!r}: there must be one more than there are boundaries "
                f"({len(self.boundaries)}); the first holds from step 0 on"
            )

    def __call__(self, step: int) -> int:
        """Return the interval in force.

        Args:
            step: the step of a refresh.

        Returns:
            Steps to the next refresh.
        """
        # whole steps times epochs, not steps over steps_per_epoch: the same comparison without a rounded quotient
        return self.intervals[sum(step >= b * (self.steps_per_epoch or 1) for b in self.boundaries)]


@dataclass(frozen=True)
class Geometric:
    """An interval that grows by the same factor on each refresh, from ``first`` to ``last`` (Chen et al. 2021, 3.2).

    With ``last`` the number of steps in an epoch it ends at one refresh an epoch, as the paper has it on ResNet-50. The
    interval is a function of the step alone: where refreshes follow each other at intervals k, factor · k, factor² · k,
    and so on, the interval is ``first + (factor - 1) · step``, so that is what it is, rounded down, up to ``last``.

    Args:
        first: the interval after the first step, in steps; at least 1.
        last: the longest interval, in steps; not below ``first``.
        factor: growth on each refresh, above 1: 1.2 goes from 10 to 500 in 22 refreshes, over 2,450 steps.

    Raises:
        ValueError: a value is out of range.
    """

    first: int
    last: int
    factor: float

    def __post_init__(self) -> None:
        check_interval("first", self.first)
        check_interval("last", self.last)
        if self.last < self.first:
            raise ValueError(f"last={self.last!r}: last must be first={self.first!r} or more: the interval grows")
        if _number("factor", self.factor) <= 1:
            raise ValueError(f"factor={self.factor!r}: factor must be above 1; Constant does not grow")

    def __call__(self, step: int) -> int:
        """Return the interval in force.

        Args:
            step: the step of a refresh.

        Returns:
            Steps to the next refresh.
        """
        # the product first: 1.2 · 5 is 6 in floating point too, 0.2 · 5 of (1.2 - 1) is not 1
        return math.floor(min(float(self.last), self.first - step + self.factor * step))


def steps_until_next(interval: Callable[[int], int], step: int) -> int:
    """Ask a schedule for the way to the next refresh.

    Args:
        interval: a schedule or any callable.
        step: the step of a refresh, counted from 0.

    Returns:
        The steps until the next one, at least 1.

    Raises:
        ValueError: it gives something else.
    """
    return check_interval(f"update_interval({step})", interval(step))
