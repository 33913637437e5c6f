"""The training loop. Everything else (files, progress bars, signals) is a `Callback`."""

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from torch_thor.training.config.run_config import RunConfig
from torch_thor.training.engine import parallel, schedule_step, sharding
from torch_thor.training.engine.evaluation import evaluate
from torch_thor.training.engine.history import EvalPoint, History, RefreshPoint, StepPoint
from torch_thor.training.engine.refreshes import refresh_due, refresh_points
from torch_thor.training.engine.step import Stepper
from torch_thor.training.errors import require
from torch_thor.training.tasks.task import Batch, Task, primary


class Run:
    """A training in progress, as callbacks see it.

    Args:
        model: The network, on its device.
        optimizer: Its optimizer.
        task: The task, on the same device.
        config: The settings of the training.
        average: The average of the weights, which must be created before the optimizer (see `averaging.averaged`);
            `None` keeps no average.

    Raises:
        UserError: If the settings do not fit the task or the data.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        config: RunConfig,
        average: AveragedModel | None = None,
    ) -> None:
        self.model, self.optimizer, self.task, self.config, self.average = model, optimizer, task, config, average
        self.primary = primary(task.metrics())
        if config.stop_at is not None:
            self.primary.check_target("stop_at", config.stop_at)
        self.streams = task.open_data(parallel.shard())
        self.stepper = Stepper(model, optimizer, task, config)
        self.steps_per_epoch = len(self.streams.train)
        phases = [phase.steps for phase in config.phases]
        require(
            not phases or self.steps_per_epoch == sum(phases),
            f"phases have {sum(phases)} steps, and the task's batches {self.steps_per_epoch}: this task has no phases",
        )
        self.total_steps = config.steps or self.steps_per_epoch * config.epochs
        schedule_step.check_all(optimizer, config, self.steps_per_epoch, self.total_steps)
        self.eval_interval = config.eval_interval or self.steps_per_epoch * config.eval_epochs
        self.step = 0
        self.seconds = 0.0
        self.record = History()

    @property
    def reached(self) -> bool:
        """Whether the latest evaluation has reached the target at which the training ends."""
        evaluations, goal = self.record.evaluations, self.config.stop_at
        return goal is not None and bool(evaluations) and evaluations[-1].reaches(goal)

    @property
    def done(self) -> bool:
        """Whether the training has ended."""
        return self.step >= self.total_steps or self.reached


class Callback:
    """The base class of the observers of a run. Every method does nothing unless it is overridden."""

    def before_training(self, run: Run) -> None:
        """Called once; `run.step` is above 0 when a run is resumed.

        Args:
            run: The training.
        """

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Called after each optimizer step.

        Args:
            run: The training.
            point: The measurements of the step.
        """

    def after_refresh(self, run: Run, points: Sequence[RefreshPoint]) -> None:
        """Called after each step with a refresh, after `after_step`.

        Args:
            run: The training.
            points: The decisions of the trace rule, one for each layer that was due.
        """

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Called after each evaluation.

        Args:
            run: The training.
            point: The metrics of the evaluation.
        """

    def at_boundary(self, run: Run) -> None:
        """Called after each step and its evaluation, if any. Saving a checkpoint and stopping belong here.

        Args:
            run: The training.
        """

    def after_training(self, run: Run) -> None:
        """Called once, when the last step is done.

        Args:
            run: The training.
        """


def train(run: Run, callbacks: Sequence[Callback] = ()) -> History:
    """Train from `run.step` to the last step, or until the target is reached.

    Args:
        run: A new run, or one into which a checkpoint was loaded.
        callbacks: The observers, which are called in this order.

    Returns:
        The record of all steps, refreshes and evaluations.

    Raises:
        DivergedError: If the loss or a gradient is no longer finite.
    """
    for callback in callbacks:
        callback.before_training(run)
    run.model.train()
    batches = run.streams.train.endless()
    while not run.done:
        point = _step(run, batches)
        run.record.steps.append(point)
        for callback in callbacks:
            callback.after_step(run, point)
        refreshes = refresh_points(run.optimizer, run.step)
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


def _step(run: Run, batches: Iterator[Batch]) -> StepPoint:
    optimizer = run.optimizer
    schedule_step.apply_all(optimizer, run.config, run.step, run.steps_per_epoch, run.total_steps)
    refresh = refresh_due(optimizer)
    started = time.perf_counter()
    batch = next(batches)
    waited = time.perf_counter() - started
    result = run.stepper.take(batch, run.step + 1)
    if run.average is not None and not result.skipped:
        run.average.update_parameters(run.model)
    duration = time.perf_counter() - started
    run.step += 1
    run.seconds += duration
    group = optimizer.param_groups[0]
    return StepPoint(
        step=run.step,
        loss=result.loss,
        lr=float(group["lr"]),
        seconds=run.seconds,
        duration=duration,
        refresh=refresh,
        terms=result.terms,
        waited=waited,
        damping=float(group["damping"]) if "damping" in group else None,
        skipped=result.skipped,
    )


def _evaluation(run: Run) -> EvalPoint:
    def score(model: nn.Module) -> Mapping[str, float]:
        parallel.share_buffers(model)
        metrics = evaluate(run.task, model, run.streams.evaluation).metrics
        sharding.release(model)
        return metrics

    return EvalPoint(
        run.step,
        run.seconds,
        score(run.model),
        None if run.average is None else score(run.average.module),
        run.primary.name,
        run.primary.higher_is_better,
    )
