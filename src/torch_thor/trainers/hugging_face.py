"""For the Trainers of transformers and TRL: ``Trainer(..., callbacks=[CurvatureCallback()])``."""

import warnings
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from torch_thor.trainers.labels import follow_labels
from torch_thor.trainers.wrapped import find_optimizer


class CurvatureCallback(TrainerCallback):
    """Tells THOR and ThorMuon of loss terms and padding, as ``torch_thor.follow_labels`` does.

    It warns of ``learning_rate`` and ``weight_decay`` of the arguments where the optimizer has
    others, because the Trainer gives them to no optimizer that exists already.
    """

    def __init__(self) -> None:
        self._end: Callable[[], None] = lambda: None

    def on_train_begin(
        self, args: TrainingArguments, *others: Any, optimizer: Any = None, **given: Any
    ) -> None:
        """Begin to follow the labels."""
        self._end()  # of a training that an error has ended
        inner = find_optimizer(optimizer)
        if inner is None:
            return
        self._end = follow_labels(inner)
        for ours, theirs in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
            usual, asked = TrainingArguments.__dataclass_fields__[theirs], getattr(args, theirs)
            has = {float(group.get(f"initial_{ours}", group[ours])) for group in inner.param_groups}
            if asked not in (usual.default, *has):
                label = type(inner).__name__
                text = f"TrainingArguments.{theirs}={asked} has no effect: give {ours} to {label}"
                warnings.warn(text, UserWarning, stacklevel=2)

    def on_train_end(self, *others: Any, **given: Any) -> None:
        """End it."""
        self._end()
