"""Warnings of a step: each problem once, after the step, because a program may turn warnings into errors."""

import warnings
from collections.abc import Hashable


class StepWarnings:
    """What is to be told after the step."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self.untold: list[str] = []

    def note(self, about: Hashable, message: str) -> None:
        """Have something told, if it has not been.

        Args:
            about: what tells it from all else, be the message as it may.
            message: the text.
        """
        if about not in self._known:
            self._known.add(about)
            self.untold.append(message)

    def tell(self) -> None:
        """Warn of what was noted; to be called by the optimizer's ``step``."""
        untold, self.untold = self.untold, []
        for message in untold:
            warnings.warn(message, RuntimeWarning, stacklevel=5)  # the caller of step, beyond torch's wrappers
