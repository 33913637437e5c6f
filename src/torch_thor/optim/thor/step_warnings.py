"""Warnings of a step: each is issued once, and after the step, because a program may turn warnings into errors."""

import warnings
from collections.abc import Hashable


class StepWarnings:
    """The warnings to issue when the step is complete."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self.pending: list[str] = []

    def note(self, about: Hashable, message: str) -> None:
        """Add a warning, unless one about the same problem has been added before.

        Args:
            about: a key that identifies the problem; the message may differ.
            message: the text of the warning.
        """
        if about not in self._known:
            self._known.add(about)
            self.pending.append(message)

    def issue(self) -> None:
        """Issue the warnings that have been added. Must be called by the optimizer's ``step``."""
        pending, self.pending = self.pending, []
        for message in pending:
            warnings.warn(message, RuntimeWarning, stacklevel=5)  # the caller of step, outside torch's wrappers
