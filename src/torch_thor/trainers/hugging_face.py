"""For the Trainers of transformers and TRL: ``Trainer(..., callbacks=[CurvatureCallback()])``."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from torch_thor.trainers.labels import follow_labels
from torch_thor.trainers.wrapped import find_optimizer


class CurvatureCallback(TrainerCallback):
    """Tells THOR and ThorMuon of loss terms and padding, as ``torch_thor.follow_labels`` does.

    The Trainer gives ``learning_rate`` and ``weight_decay`` of its arguments to no optimizer that
    exists already.
    """

    def __init__(self) -> None:
        self._end: Callable[[], None] = lambda: None

    def on_train_begin(
        self, args: TrainingArguments, *others: Any, optimizer: Any = None, **given: Any
    ) -> None:
        """Begin to follow the labels."""
        self._end()  # of a training that an error has ended
        if (inner := find_optimizer(optimizer)) is not None:
            self._end = follow_labels(inner)

    def on_train_end(self, *others: Any, **given: Any) -> None:
        """End it."""
        self._end()
