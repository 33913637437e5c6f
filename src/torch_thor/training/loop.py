"""The training loop, whose files, bars and plots are observers.

A checkpoint is saved after a step, or not at all.
"""

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.errors import DivergedError, require
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.thor import THOR
from torch_thor.torch_internals import tree_flatten, tree_unflatten
from torch_thor.training import recipe_schedules as schedules
from torch_thor.training.evaluation import evaluate
from torch_thor.training.parallel import Ranks, RankWeight, without_averaging
from torch_thor.training.precision import Precision
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.tasks.task import Batch, Task, Terms, primary

# Ctrl-C, a scheduler's end and its warnings before that, and a terminal that is closed
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


@dataclass(frozen=True)
class Point:
    """The measurements of one step, over all processes.

    Args:
        step: The number of the step, from 1.
        loss: The mean of the training loss over its terms; only in a skipped step it may be inf or
            NaN.
        lr: The learning rate.
        damping: The damping; None for optimizers without.
        seconds: Time of all steps so far, without evaluations, checkpoints and reports.
        duration: Time of this step, with the time of waiting for data.
        waited: Time of waiting for data.
        terms: The number of loss terms.
        skipped: Whether a gradient was not finite (an overflow of float16), so that the weights
            were not changed.
        refresh: Whether the step gathered statistics of the curvature.
        events: The decisions of the trace rule in this step.
    """

    step: int
    loss: float
    lr: float
    damping: float | None
    seconds: float
    duration: float
    waited: float
    terms: int
    skipped: bool
    refresh: bool
    events: tuple[RefreshEvent, ...] = ()


@dataclass(frozen=True)
class Score:
    """The metrics of one evaluation.

    Args:
        step: The number of steps before it.
        seconds: The time of these steps.
        metrics: The metrics of the weights, by name.
        averaged: Those of the averaged weights; None if there are none.
    """

    step: int
    seconds: float
    metrics: Mapping[str, float]
    averaged: Mapping[str, float] | None = None

    def value(self, name: str) -> float:
        """Return a metric, of the averaged weights if there are any."""
        return (self.metrics if self.averaged is None else self.averaged)[name]


class Observer:
    """An observer of a run, which by default does nothing.

    Those of the first process write files and print; one saves and stops.
    """

    def step(self, run: "Run", point: Point) -> None:
        """Called after each step."""

    def evaluation(self, run: "Run", score: Score) -> None:
        """Called after each evaluation."""

    def end_of_step(self, run: "Run") -> None:
        """Called after each step and its evaluation, if any."""

    def close(self) -> None:
        """Called once when the training has ended, also by an error."""


@dataclass
class Record(Observer):
    """An observer that keeps what a short training measures, for scripts.

    Its memory grows with the steps.
    """

    points: list[Point] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    def step(self, run: "Run", point: Point) -> None:
        """Keep the measurements of a step."""
        self.points.append(point)

    def evaluation(self, run: "Run", score: Score) -> None:
        """Keep the metrics of an evaluation."""
        self.scores.append(score)


@dataclass
class Run:
    """A training in progress, as ``torch_thor.training.run.build`` makes it.

    Args:
        recipe: Its settings.
        name: The name of the optimizer.
        task: The task.
        model: The network, on its device.
        net: The network whose gradients are those of all processes: wrapped, compiled or just
            `model`.
        optimizer: Its optimizer.
        precision: Autocast and loss scale.
        ranks: The process among those that train together.
        weight: The weight of this process in the mean over all, set in each step.
        average: The average of the weights; None for none.
        step: Steps taken.
        seconds: Their time.
        score: The latest evaluation.
        best: The first evaluation with the best value of the primary metric.
        stopping: Whether a signal has asked to stop, on any process.
    """

    recipe: Recipe
    name: str
    task: Task
    model: nn.Module
    net: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    ranks: Ranks
    weight: RankWeight
    average: AveragedModel | None = None
    step: int = 0
    seconds: float = 0.0
    score: Score | None = None
    best: Score | None = None
    stopping: bool = False

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole training."""
        return self.recipe.total_steps(self.task.steps_per_epoch)

    @property
    def unevaluated(self) -> bool:
        """Whether the evaluation that follows the latest step is still to come."""
        interval = self.recipe.eval_interval or self.recipe.eval_epochs * self.task.steps_per_epoch
        is_due = self.step % interval == 0 or self.step == self.total_steps
        evaluated = 0 if self.score is None else self.score.step
        return is_due and evaluated != self.step

    @property
    def done(self) -> bool:
        """Whether training ends: the last step is taken, or the last evaluation met the target."""
        goal, metric = self.recipe.stop_at, primary(self.task.metrics)
        is_met = (
            goal is not None
            and self.score is not None
            and not metric.better(goal, self.score.value(metric.name))
        )
        return is_met or self.step >= self.total_steps


def train(run: Run, observers: Sequence[Observer] = (), *, stops: Sequence[int] = ()) -> None:
    """Train from `run.step` to the last step, or until the target is reached.

    Args:
        run: A new run, or a run into which a checkpoint was loaded.
        observers: Called in this order.
        stops: Becomes true (gets an element) when a signal asks this process to stop.

    Raises:
        DivergedError: If the loss, or a layer's statistics, are no longer finite.
    """
    run.model.train()
    with ExitStack() as closing:
        for observer in observers:
            closing.callback(observer.close)
        if run.unevaluated:  # the evaluation after the latest step was not finished
            _finish_step(run, observers, stops)
        feed = Feed(run, stops)
        while not run.done:
            schedules.apply(run.optimizer, run.recipe, run.step, run.task.steps_per_epoch)
            point = take_step(run, feed)
            for observer in observers:
                observer.step(run, point)
            _finish_step(run, observers, stops)


@contextmanager
def listening() -> Iterator[list[int]]:
    """Note signals that ask the training to stop while the block runs; a second signal ends it."""
    received: list[int] = []
    before = {
        number: handler
        for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name))
        # nohup ignores SIGHUP; the SIGINT that a shell's background jobs ignore is meant for us
        if (handler := signal.getsignal(number)) != signal.SIG_IGN or number != signal.SIGHUP
    }

    def handle(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish_step(run: Run, observers: Sequence[Observer], stops: Sequence[int]) -> None:
    """Evaluate if it is time, and let observers save."""
    if run.unevaluated and (score := _evaluate(run, stops)) is not None:
        for observer in observers:
            observer.evaluation(run, score)
    for observer in observers:
        observer.end_of_step(run)


def _evaluate(run: Run, stops: Sequence[int]) -> Score | None:
    """Evaluate the network; None if a signal has stopped that."""
    measured: list[dict[str, float]] = []
    for model in [run.model, *([] if run.average is None else [run.average.module])]:
        evaluation = evaluate(run.task, model, run.ranks, stops)
        if evaluation is None:
            run.stopping = True
            return None
        measured.append(evaluation[0])
    run.score = score = Score(run.step, run.seconds, measured[0], *measured[1:])
    metric = primary(run.task.metrics)
    if run.best is None or metric.better(score.value(metric.name), run.best.value(metric.name)):
        run.best = score
    return score


class Feed:
    """The micro-batches of each step with their loss terms, read one step ahead.

    So one all-reduce a step is enough: it sums the loss of a step, and the terms of the next step,
    whose gradients are weighted by them.
    """

    def __init__(self, run: Run, stops: Sequence[int]) -> None:
        self._run, self._stops = run, stops
        self._batches: Iterator[Batch] = run.task.batches(run.ranks, run.step)
        self._read(run.step)
        (self.everywhere,) = run.ranks.total([float(self.loss_terms)])

    def _read(self, step: int) -> None:
        parts = split(next(self._batches), self._run.recipe.accumulation_at(step))
        self.parts: list[tuple[Batch, Terms]] = [
            (part, self._run.task.terms(part)) for part in parts
        ]
        self.loss_terms = sum(part_terms.number for _, part_terms in self.parts)
        require(
            self.loss_terms > 0,
            f"the batch of step {step + 1} has no loss term on a process: each needs some; "
            "let the task leave such samples out, or raise batch_size",
        )

    def exchange(self, loss: float) -> tuple[float, int]:
        """Read the next batch; return this step's mean loss over all processes, and loss terms."""
        run, loss_terms, everywhere = self._run, self.loss_terms, self.everywhere
        started = time.perf_counter()
        if run.step + 1 < run.total_steps:
            self._read(run.step + 1)
        self.waited = time.perf_counter() - started  # for data, and not for other processes
        total, self.everywhere, stops = run.ranks.total(
            [loss * loss_terms, float(self.loss_terms), float(bool(self._stops))]
        )
        run.stopping = stops > 0
        return total / everywhere, int(everywhere)


def take_step(run: Run, feed: Feed) -> Point:
    """Take one step of the optimizer on the batch in the feed, which then reads the next batch."""
    optimizer, task, recipe = run.optimizer, run.task, run.recipe
    thor = optimizer if isinstance(optimizer, CurvatureOptimizer) else None
    refresh = thor is not None and any(layer.due for layer in thor.curvature.values())
    started = time.perf_counter()
    run.weight.value = run.ranks.world * feed.loss_terms / feed.everywhere
    # The factor A does not depend on the number of loss terms.
    if thor is not None and thor.form.has_g:
        thor.loss_terms = feed.loss_terms
    loss: torch.Tensor | float = 0.0
    for number, (part, part_terms) in enumerate(feed.parts, 1):
        with nullcontext() if number == len(feed.parts) else without_averaging(run.net):
            if thor is not None:
                thor.row_mask = part_terms.row_mask
            with run.precision.autocast():
                part_loss = task.loss(run.net, part)
                if isinstance(thor, THOR) and thor.fisher == "sampled":
                    thor.sample_fisher(
                        part_loss.output,
                        part_loss.distribution,
                        seed=recipe.seed,
                    )
                share = (
                    part_loss.mean
                    if part_terms.number == feed.loss_terms
                    else part_loss.mean * (part_terms.number / feed.loss_terms)
                )
            run.precision.backward(share)
        loss = loss + share.detach()
    if recipe.clip_norm is not None:
        run.precision.clip(optimizer, recipe.clip_norm)
    taken = _stepped(run)
    optimizer.zero_grad()
    # This waits for the device, because the step is timed and its loss recorded.
    mean, count = feed.exchange(float(loss))
    lr = float(optimizer.param_groups[0]["lr"])
    if not math.isfinite(mean) and taken:
        raise DivergedError(
            f"the loss became {mean} at step {run.step + 1} (lr={lr:.3g}): lower lr, add warm-up "
            "(schedule.warmup_epochs), or raise damping"
        )
    if run.average is not None and taken:
        run.average.update_parameters(run.model)
    duration = time.perf_counter() - started
    run.step, run.seconds = run.step + 1, run.seconds + duration
    damping: Any = optimizer.param_groups[0].get("damping")
    return Point(
        run.step, mean, lr, None if damping is None else float(damping), run.seconds, duration,
        feed.waited, count,
        not taken, refresh,
        thor.last_refresh if taken and thor is not None else (),  # a skipped step decides nothing
    )  # fmt: skip


def _stepped(run: Run) -> bool:
    """Step, and return whether it was taken; a refresh refuses statistics that are not finite."""
    try:
        return run.precision.step(run.optimizer)
    except FloatingPointError as error:
        raise DivergedError(f"step {run.step + 1}: {error}") from error


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch into micro-batches, as `torch.Tensor.chunk` does: perhaps into fewer."""
    if parts == 1:
        return [batch]
    leaves, form = tree_flatten(batch)
    return [
        tree_unflatten(list(piece), form)
        for piece in zip(*(leaf.chunk(parts) for leaf in leaves), strict=True)
    ]
