"""The phases of gathering: what each layer's calls are used for, and where the inputs of a step stand.

Both belong to :class:`torch_thor.capture.capture.Capture`, which alone changes them. What must outlive the process is
in the layer's state (``due``, ``idle``, ``uncalled``); the phases are derived from it.
"""

import enum
from collections.abc import Callable
from typing import Any

Gradients = Callable[[], Any]


class Phase(enum.Enum):
    """What the calls of one layer are used for until the next step.

    OFF: for nothing; no hook is there for them. COUNTING: its inputs tell the number of loss terms, and no statistics
    are gathered. OPTIONAL: statistics are gathered if they come, and nobody waits for them, because no loss has reached
    the layer, its weight is frozen, or its weight is used without calling it. REQUIRED: statistics are gathered; the
    passes of the step are run so that they come (without ``torch.compile``), and a step in which the layer has a
    gradient and none has come is an error or is reported.
    """

    OFF = enum.auto()
    COUNTING = enum.auto()
    OPTIONAL = enum.auto()
    REQUIRED = enum.auto()

    @property
    def gathers(self) -> bool:
        """Whether statistics are gathered."""
        return self in (Phase.OPTIONAL, Phase.REQUIRED)

    @classmethod
    def of(cls, *, due: bool, awaited: bool, counts: bool) -> "Phase":
        """Return the phase of a layer.

        Args:
            due: whether it wants new factors.
            awaited: whether the statistics can be expected to come.
            counts: whether the number of loss terms is to be read off its inputs.

        Returns:
            The phase; a layer that gathers also counts.
        """
        if due:
            return cls.REQUIRED if awaited else cls.OPTIONAL
        return cls.COUNTING if counts else cls.OFF


class InputPhase(enum.Enum):
    """Where the inputs stand that are gathered in forward passes, before it is known what becomes of their loss.

    NONE: none has been gathered in this step. GATHERED: some have. RESET: some have, and the gradients have been reset
    before their backward pass: it is still to come (loops call ``zero_grad`` between forward pass and
    ``loss.backward()``), or it never comes, because the loss was dropped.
    """

    NONE = enum.auto()
    GATHERED = enum.auto()
    RESET = enum.auto()


class GatheredInputs:
    """Tells whether the inputs gathered so far belong to a loss that was dropped, from what became of the gradients.

    ``gradients``, where a method takes it, returns a value that changes when a backward pass adds to the weights'
    gradients; it is called only where it is needed.
    """

    def __init__(self) -> None:
        self._mark: Any = None  # the gradients as they were when the first input of the step was gathered
        self.phase = InputPhase.NONE

    def forget(self) -> None:
        """Take note that the inputs of this step have been dropped, or used."""
        self.phase, self._mark = InputPhase.NONE, None

    def are_dropped(self, gradients: Gradients) -> bool:
        """Return whether a new forward pass shows that the loss of those before was dropped (it was not finite, say).

        Args:
            gradients: as above.

        Returns:
            Whether gradients were reset after they were gathered, and no backward pass has come since.
        """
        return self.phase is InputPhase.RESET and self._mark == gradients()

    def add(self, gradients: Gradients) -> None:
        """Take note that an input is gathered.

        Args:
            gradients: as above.
        """
        if self.phase is InputPhase.NONE:
            self._mark = gradients()
        self.phase = InputPhase.GATHERED

    def before_reset(self, gradients: Gradients) -> bool:
        """Take note that gradients are about to be reset.

        Args:
            gradients: as above.

        Returns:
            Whether the inputs stay, because the backward pass of their loss has not come yet.
        """
        if self.phase is InputPhase.NONE or self._mark != gradients():
            return False
        self.phase = InputPhase.RESET
        return True

    def after_reset(self, gradients: Gradients) -> None:
        """Take note that gradients have been reset.

        Args:
            gradients: as above.
        """
        if self.phase is not InputPhase.NONE:
            self._mark = gradients()
