"""For the Trainers of transformers and TRL: ``Trainer(..., callbacks=[CurvatureCallback()])``."""

import warnings
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from torch_thor.optim.groups import held
from torch_thor.trainers.labels import follow_labels


class CurvatureCallback(TrainerCallback):
    """Tells THOR and ThorMuon of loss terms and padding, as ``torch_thor.follow_labels`` does.

    It warns of ``learning_rate`` and ``weight_decay`` of ``TrainingArguments`` that an optimizer
    does not have which was made before, because the Trainer gives them only to optimizers that it
    makes. With other optimizers it does nothing.
    """

    def __init__(self) -> None:
        self._end: Callable[[], None] = lambda: None

    def on_train_begin(
        self, args: TrainingArguments, *others: Any, optimizer: Any = None, **given: Any
    ) -> None:
        """Begin to follow the labels."""
        self._end()  # of a training that an error has ended
        inner = held(optimizer)
        if inner is None:
            return
        self._end = follow_labels(inner)
        usual = TrainingArguments.__dataclass_fields__
        for ours, theirs in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
            has = {float(group.get(f"initial_{ours}", group[ours])) for group in inner.param_groups}
            if getattr(args, theirs) not in (usual[theirs].default, *has):
                warnings.warn(
                    f"TrainingArguments.{theirs}={getattr(args, theirs)} has no effect: "
                    f"{type(inner).__name__} has {ours}={max(has):g}; give {ours} to "
                    f"{type(inner).__name__}, and leave {theirs} out",
                    UserWarning,
                    stacklevel=2,
                )

    def on_train_end(self, *others: Any, **given: Any) -> None:
        """End it."""
        self._end()
