"""Training batches of several consecutive phases, which may differ in their examples and batch sizes."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch_thor.training.data.stream import Batch, TrainingStream
from torch_thor.training.errors import require


class PhasedStream:
    """The batches of several streams, one stream per phase. All phases together count as one epoch.

    The batch of a step depends only on the number of the step. A training run that is resumed in any phase therefore
    continues as it would have without the interruption.

    Args:
        phases: The number of steps and the stream of each phase.
    """

    def __init__(self, phases: Sequence[tuple[int, TrainingStream]]) -> None:
        self.steps = [steps for steps, _ in phases]
        self.streams: list[TrainingStream | None] = [stream for _, stream in phases]
        self.phase = 0
        self.done = 0  # completed steps of the current phase

    def __len__(self) -> int:
        """Return the number of batches of all phases."""
        return sum(self.steps)

    def endless(self) -> Iterator[Batch]:
        """Yield all batches from the current position to the end of the last phase.

        Yields:
            Trees of tensors.
        """
        while self.phase < len(self.steps):
            yield from self._rest()
            self.streams[self.phase] = None  # releases the stream and its worker processes, if any
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
        """Continue at the position of another stream.

        Args:
            state: The result of `state_dict`, of any rank and any number of ranks.

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
