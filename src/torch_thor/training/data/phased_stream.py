"""Training batches of several phases, one after the other: other examples, or another batch size, from some step on."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch_thor.training.data.stream import Batch, TrainingStream
from torch_thor.training.errors import require


class PhasedStream:
    """The batches of one stream for some steps, then those of the next. All phases together count as one epoch.

    What a step sees is a function of its number. So a training that is resumed in any phase continues as it would have
    without the interruption.

    Args:
        phases: For each phase its steps and its stream.
    """

    def __init__(self, phases: Sequence[tuple[int, TrainingStream]]) -> None:
        self.steps = [steps for steps, _ in phases]
        self.streams: list[TrainingStream | None] = [stream for _, stream in phases]
        self.phase = 0
        self.done = 0  # steps of the phase

    def __len__(self) -> int:
        """Batches of all phases."""
        return sum(self.steps)

    def endless(self) -> Iterator[Batch]:
        """All batches from here to the end of the last phase.

        Yields:
            Trees of tensors.
        """
        while self.phase < len(self.steps):
            yield from self._rest()
            self.streams[self.phase] = None  # with the worker processes that it may have
            self.phase, self.done = self.phase + 1, 0

    def __iter__(self) -> Iterator[Batch]:
        return self.endless()

    def _rest(self) -> Iterator[Batch]:
        stream = self.streams[self.phase]
        assert stream is not None
        batches = stream.endless()
        while self.done < self.steps[self.phase]:
            batch = next(batches)
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position.

        Returns:
            Plain values.
        """
        stream = self.streams[self.phase]
        assert stream is not None
        return {"phase": self.phase, "done": self.done, "steps": self.steps, "stream": stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another stream was.

        Args:
            state: From `state_dict`, of this rank or another, of as many ranks or not.

        Raises:
            UserError: If the other stream had other phases, other data, another seed or another batch size.
        """
        known = state.get("steps")
        require(
            known == self.steps,
            f"the checkpoint's phases have {known or 'no'} steps, this run's {self.steps}: resume with the same phases",
        )
        self.phase, self.done = state["phase"], state["done"]
        stream = self.streams[self.phase]
        assert stream is not None
        stream.load_state_dict(state["stream"])
