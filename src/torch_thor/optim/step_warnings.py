"""Warnings of a step: each is issued once, and after the step, because a program may turn warnings into errors."""

import warnings
from collections.abc import Hashable

from torch_thor.optim.gradient_checks import some


class StepWarnings:
    """The warnings to issue when the step is complete."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self.pending: dict[tuple[str, str], list[str]] = {}  # the names that one text is about, by its two parts

    def note(self, about: Hashable, message: str, name: str | None = None, then: str = "") -> None:
        """Add a warning, unless one about the same problem has been added before."""
        if about not in self._known:
            self._known.add(about)
            names = self.pending.setdefault((message, then), [])
            names += [] if name is None else [repr(name)]

    def issue(self) -> None:
        """Issue the warnings that have been added. Must be called by the optimizer's ``step``."""
        pending, self.pending = self.pending, {}
        for (message, then), names in pending.items():
            others = f" (likewise {some(names[1:])})" if len(names) > 1 else ""
            text = f"{message}{''.join(names[:1])}{others}{then}"
            warnings.warn(text, RuntimeWarning, stacklevel=5)  # the caller of step, outside torch's wrappers
