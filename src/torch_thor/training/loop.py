"""The training loop. Everything that is not arithmetic (files, bars, signals) is a `Callback`."""

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.optim import THOR
from torch_thor.training import schedules
from torch_thor.training.data import DataBundle, epoch_order
from torch_thor.training.errors import UserError, require
from torch_thor.training.evaluation import evaluate
from torch_thor.training.plan import Plan
from torch_thor.training.record import EvalPoint, Record, RefreshPoint, StepPoint


class Run:
    """A training in progress: what callbacks see.

    Args:
        model: The network, on its device.
        optimizer: Its optimizer.
        data: The data, on the same device.
        plan: What to do.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: DataBundle, plan: Plan) -> None:
        self.model, self.optimizer, self.data, self.plan = model, optimizer, data, plan
        self.steps_per_epoch = len(data.train_images) // plan.batch_size
        require(
            self.steps_per_epoch >= 1,
            f"batch_size={plan.batch_size} is larger than the training set ({len(data.train_images)} images)",
        )
        self.total_steps = self.steps_per_epoch * plan.epochs
        self.schedules = {"lr": plan.schedule, "damping": plan.damping_schedule}
        for key, schedule in self.schedules.items():
            schedules.check(optimizer, key, schedule, self.steps_per_epoch, self.total_steps)
        self.eval_interval = plan.eval_interval or self.steps_per_epoch
        self.step = 0
        self.seconds = 0.0
        self.record = Record()
        self.order_epoch = -1
        self.order = torch.empty(0, dtype=torch.int64)

    def batch(self) -> torch.Tensor:
        """The images of the next step.

        Returns:
            Their indices in the training set, (batch_size,), on the data's device.
        """
        epoch, position = divmod(self.step, self.steps_per_epoch)
        if epoch != self.order_epoch:
            order = epoch_order(len(self.data.train_images), self.plan.seed, epoch)
            self.order, self.order_epoch = order.to(self.data.train_images.device), epoch
        return self.order[position * self.plan.batch_size : (position + 1) * self.plan.batch_size]


class Callback:
    """Something that watches a run. Every method may be left as it is."""

    def before_training(self, run: Run) -> None:
        """Called once; `run.step` is above 0 when a run is resumed.

        Args:
            run: The training.
        """

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Called after each optimizer step.

        Args:
            run: The training.
            point: What the step measured.
        """

    def after_refresh(self, run: Run, points: Sequence[RefreshPoint]) -> None:
        """Called after each step that decided about the curvature of one layer or more, after `after_step`.

        Args:
            run: The training.
            points: What it decided, layer by layer.
        """

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Called after each evaluation.

        Args:
            run: The training.
            point: What the evaluation measured.
        """

    def at_boundary(self, run: Run) -> None:
        """Called after each step and the evaluation that belongs to it: the place to save or to stop.

        Args:
            run: The training.
        """

    def after_training(self, run: Run) -> None:
        """Called once, when the last step is done.

        Args:
            run: The training.
        """


def train(run: Run, callbacks: Sequence[Callback] = ()) -> Record:
    """Train from `run.step` to the end of the plan.

    Args:
        run: A new training, or one that a checkpoint was loaded into.
        callbacks: Told what happens, in this order.

    Returns:
        The loss at every step, what every refresh decided, and the accuracy at every evaluation.
    """
    for callback in callbacks:
        callback.before_training(run)
    run.model.train()
    while run.step < run.total_steps:
        point = _step(run)
        run.record.steps.append(point)
        for callback in callbacks:
            callback.after_step(run, point)
        refreshes = refresh_points(run)
        run.record.refreshes.extend(refreshes)
        if refreshes:
            for callback in callbacks:
                callback.after_refresh(run, refreshes)
        if run.step % run.eval_interval == 0 or run.step == run.total_steps:
            score = _evaluation(run)
            run.record.evaluations.append(score)
            for callback in callbacks:
                callback.after_evaluation(run, score)
        for callback in callbacks:
            callback.at_boundary(run)
    for callback in callbacks:
        callback.after_training(run)
    return run.record


def _step(run: Run) -> StepPoint:
    plan, data, optimizer = run.plan, run.data, run.optimizer
    for key, schedule in run.schedules.items():
        schedules.apply(optimizer, key, schedule, run.step, run.steps_per_epoch, run.total_steps)
    refresh = refresh_due(optimizer)
    started = time.perf_counter()
    chosen = run.batch()
    scores = run.model(data.train_images[chosen])
    loss = functional.cross_entropy(scores, data.train_labels[chosen], label_smoothing=plan.label_smoothing)
    loss.backward()
    try:
        optimizer.step()
    except FloatingPointError as error:  # THOR refuses a gradient that is not finite
        raise UserError(f"step {run.step + 1}: {error}") from error
    optimizer.zero_grad()
    value = loss.item()  # waits for the device: the step is timed, and its loss is recorded
    duration = time.perf_counter() - started
    if not math.isfinite(value):
        raise UserError(
            f"the loss became {value} at step {run.step + 1} (lr={optimizer.param_groups[0]['lr']:.3g}): "
            "lower lr, add warm-up (schedule.warmup_epochs), or raise damping"
        )
    run.step += 1
    run.seconds += duration
    return StepPoint(
        step=run.step,
        loss=value,
        lr=optimizer.param_groups[0]["lr"],
        seconds=run.seconds,
        duration=duration,
        refresh=refresh,
    )


def _evaluation(run: Run) -> EvalPoint:
    score = evaluate(run.model, run.data.test_images, run.data.test_labels, run.data.classes)
    return EvalPoint(run.step, run.seconds, score.loss, score.top1, score.top5)


def curvature_of(optimizer: torch.optim.Optimizer) -> Mapping[str, LayerCurvature]:
    """The layers whose curvature an optimizer keeps.

    Args:
        optimizer: Any optimizer.

    Returns:
        Module name to layer curvature; empty for first-order optimizers.
    """
    return optimizer.curvature if isinstance(optimizer, THOR) else {}


def refresh_points(run: Run) -> list[RefreshPoint]:
    """What the step just done decided about the curvature.

    Args:
        run: The training.

    Returns:
        One point for each layer that was due; empty for first-order optimizers.
    """
    events = run.optimizer.last_refresh if isinstance(run.optimizer, THOR) else ()
    return [
        RefreshPoint(
            step=run.step,
            layer=event.layer,
            decision=event.decision.value,
            trace_change=_finite(event.trace_change),
            trace=_finite(event.trace),
        )
        for event in events
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None  # JSON has no word for the others


def refresh_due(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the coming step gathers statistics, whatever the trace rule then does with them.

    Args:
        optimizer: Any optimizer.

    Returns:
        True if a layer is due; False for first-order optimizers.
    """
    return any(layer.due for layer in curvature_of(optimizer).values())


def resolve_device(name: str) -> torch.device:
    """Turn a recipe's device into torch's.

    Args:
        name: `auto` or a device name.

    Returns:
        The device.

    Raises:
        UserError: If torch does not know the name or has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts when it was built without CUDA
        reason = str(error).splitlines()[0]
        raise UserError(f"device={name} cannot be used ({reason}): try device=cpu or device=auto") from error
    return device
