"""For the Trainers of transformers and TRL: ``Trainer(..., callbacks=[CurvatureCallback()])``."""

import warnings
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from torch_thor.optim.callers import USUAL, about_usual
from torch_thor.trainers.labels import follow_labels
from torch_thor.trainers.wrapped import find_optimizer


class CurvatureCallback(TrainerCallback):
    """Tells THOR and ThorMuon of loss terms and padding, as ``torch_thor.follow_labels`` does.

    ``learning_rate`` of ``TrainingArguments`` becomes that of a ThorMuon that was made without one;
    the default of transformers, 5e-5, means none. It warns of ``learning_rate`` and
    ``weight_decay`` that an optimizer made before does not have, because the Trainer gives them
    only to optimizers that it makes. With other optimizers it does nothing.
    """

    def __init__(self) -> None:
        self._end: Callable[[], None] = lambda: None

    def on_train_begin(
        self,
        args: TrainingArguments,
        *others: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **given: Any,
    ) -> None:
        """Begin to follow the labels."""
        self._end()  # of a training that an error has ended
        inner = find_optimizer(optimizer)
        if inner is None:
            return
        self._end = follow_labels(inner)
        if any(group.get("auto_lr") for group in inner.param_groups):
            if args.learning_rate == USUAL:
                warnings.warn(about_usual(type(inner).__name__), UserWarning, stacklevel=2)
            else:
                _give_lr(inner, args.learning_rate, lr_scheduler)
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


def _give_lr(optimizer: Any, lr: float, scheduler: Any) -> None:
    """Give a learning rate to the groups without one, and to the scheduler that lowers it."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # which Accelerate wraps
    for number, group in enumerate(optimizer.param_groups):
        if group.get("auto_lr"):
            before = float(group.get("initial_lr", group["lr"]))
            group["lr"] *= lr / before
            group["auto_lr"] = False
            if "initial_lr" in group:
                group["initial_lr"] = lr
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs[number] = lr
                scheduler._last_lr[number] = group["lr"]
