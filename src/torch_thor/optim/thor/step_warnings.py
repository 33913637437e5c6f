"""Warnings of a step: each problem once, after the step, because a program may turn warnings into errors."""

import warnings
from collections.abc import Hashable


class StepWarnings:
    """The warnings to be issued when the step is complete."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self.pending: list[str] = []

    def note(self, about: Hashable, message: str) -> None:
        """Add a warning, unless one about the same problem has been added before.

        Args:
            about: identifies the problem, whatever the message.
            message: the text.
        """
        if about not in self._known:
            self._known.add(about)
            self.pending.append(message)

    def issue(self) -> None:
        """Issue the warnings that have been added; to be called by the optimizer's ``step``."""
        pending, self.pending = self.pending, []
        for message in pending:
            warnings.warn(message, RuntimeWarning, stacklevel=5)  # the caller of step, beyond torch's wrappers
