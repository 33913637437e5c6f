"""The phases of a training in a recipe. Each phase can have its own batch size, example length and other settings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_thor.training.config.schedules.spec import ScheduleSpec
from torch_thor.training.config.text_spec import SHORTEST
from torch_thor.training.errors import require


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of a training. A setting that is `None` has the value that the recipe gives for the whole training.

    Args:
        steps: Number of optimizer steps in the phase.
        length: Tokens per example, for masked-lm; `None` uses `data.text.length`.
        batch_size: Samples per step, on all processes together.
        accumulation: Number of micro-batches into which the batch of a step is divided.
        lr_factor: Factor on the learning rate during this phase.
        schedule: Schedule of the learning rate for this phase alone. It begins and ends with the phase, and an epoch in
            it is the whole phase. `None` continues the schedule of the whole training.
    """

    steps: int
    length: int | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    lr_factor: float = 1.0
    schedule: ScheduleSpec | None = None

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"phases: steps={self.steps} must be 1 or more in each phase")
        require(
            self.length is None or self.length >= SHORTEST,
            f"phases: length={self.length} must be {SHORTEST} tokens or more; null is data.text.length",
        )
        for name in ("batch_size", "accumulation"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"phases: {name}={value} must be 1 or more; null is the recipe's")
        require(
            0 < self.lr_factor < math.inf,
            f"phases: lr_factor={self.lr_factor} must be above 0: the learning rate is multiplied by it",
        )


def check_phases(
    phases: Sequence[Phase], *, epochs: int, steps: int | None, batch_size: int, accumulation: int
) -> None:
    """Check that the phases are consistent with the rest of a recipe.

    Args:
        phases: The phases. An empty sequence is consistent with every recipe.
        epochs: Number of epochs in the recipe.
        steps: Number of optimizer steps in the recipe, or `None` if it is not set.
        batch_size: Samples per step in the recipe, for phases that do not set their own.
        accumulation: Number of micro-batches per step in the recipe, for phases that do not set their own.

    Raises:
        UserError: If the phases are not consistent with the recipe.
    """
    if not phases:
        return
    numbers = [phase.steps for phase in phases]
    require(
        epochs == 1,
        f"epochs={epochs}: with phases a training ends after their {sum(numbers)} steps; leave epochs out",
    )
    require(
        steps is None or steps == sum(numbers),
        f"steps={steps} is not the sum of the phases' steps ({' + '.join(map(str, numbers))} = {sum(numbers)}): leave "
        f"steps out, or change the phases",
    )
    for number, phase in enumerate(phases):
        size, parts = phase.batch_size or batch_size, phase.accumulation or accumulation
        require(
            parts <= size,
            f"phases[{number}]: accumulation={parts} is more than batch_size={size}: it is parts of a batch",
        )


def phase_at(phases: Sequence[Phase], step: int) -> tuple[int, int]:
    """Find the phase that contains a step.

    Args:
        phases: The phases; at least one.
        step: Number of steps already taken (0 for the first step).

    Returns:
        The index of the phase, and the total number of steps in all phases before it. A step after the end of the last
        phase belongs to the last phase.
    """
    first = 0
    for index, phase in enumerate(phases[:-1]):
        if step < first + phase.steps:
            return index, first
        first += phase.steps
    return len(phases) - 1, first
