"""When the groups refresh: each counts its own steps, in the group itself, where every checkpoint sees them.

``group["step"]`` counts the steps taken, ``group["next_refresh"]`` is the step of the next refresh and
``group["update_interval"]`` the interval in force. A callable interval is the program's, not the checkpoint's: it is
kept here, and asked on each refresh for the interval to the next one.
"""

from collections.abc import Callable

from torch_thor.optim.options import check_interval
from torch_thor.optim.parameters import Group


class RefreshClock:
    """The clocks of all parameter groups."""

    def __init__(self) -> None:
        self._callables: dict[int, Callable[[int], int]] = {}

    def keep_callables(self, groups: list[Group]) -> None:
        """Take callables out of the groups.

        Args:
            groups: the optimizer's parameter groups; a callable is replaced by 1, until the first refresh asks it.
        """
        for index, group in enumerate(groups):
            if callable(group["update_interval"]):
                self._callables[index] = group["update_interval"]
                group["update_interval"] = 1

    def next(self, groups: list[Group]) -> list[tuple[int, int]]:
        """Return the clocks as they will stand after this step, and change nothing.

        Args:
            groups: the optimizer's parameter groups.

        Returns:
            Interval and step of the next refresh, group by group.
        """
        result = []
        for index, group in enumerate(groups):
            step, interval, upcoming = int(group["step"]), int(group["update_interval"]), int(group["next_refresh"])
            if step >= upcoming:
                if index in self._callables:
                    interval = check_interval(f"update_interval({step})", self._callables[index](step))
                upcoming = step + interval
            result.append((interval, upcoming))
        return result

    @staticmethod
    def advance(groups: list[Group], clocks: list[tuple[int, int]]) -> None:
        """Count a step.

        Args:
            groups: the optimizer's parameter groups.
            clocks: what :meth:`next` returned.
        """
        for group, (interval, upcoming) in zip(groups, clocks, strict=True):
            group.update(update_interval=interval, next_refresh=upcoming, step=group["step"] + 1)

    @staticmethod
    def refreshes_next(group: Group) -> bool:
        """Return whether the group's next step is a refresh.

        Args:
            group: a parameter group.

        Returns:
            Whether it is.
        """
        return bool(group["step"] >= group["next_refresh"])
