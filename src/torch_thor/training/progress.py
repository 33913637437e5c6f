"""The progress of a training: a live bar in a terminal, printed lines otherwise."""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.printing import printer
from torch_thor.training.loop import Observer, Point, Run, Score
from torch_thor.training.tasks.task import primary

WINDOW = 100  # the bar describes this many latest steps


def summarised(run: Run, points: Sequence[Point]) -> dict[str, float]:
    """Summarise consecutive steps by name: means, median durations, and settings of the last."""
    seconds, loss_terms, waited = (
        sum(getattr(point, name) for point in points) for name in ("duration", "terms", "waited")
    )
    losses = [point.loss for point in points if math.isfinite(point.loss)]
    ordinary, refresh = (
        [1000 * point.duration for point in points if point.refresh == kind]
        for kind in (False, True)
    )
    layers = (
        run.optimizer.curvature.values() if isinstance(run.optimizer, CurvatureOptimizer) else ()
    )
    summary = {
        "loss": fmean(losses) if losses else None,
        "lr": points[-1].lr,
        "damping": points[-1].damping,
        f"{run.task.unit}_per_second": loss_terms / seconds,
        "step_ms": median(ordinary) if ordinary else None,
        "refresh_step_ms": median(refresh) if refresh else None,
        "waiting_for_data": waited / seconds,
        "stopped_layers": sum(layer.stopped for layer in layers) if layers else None,
        "skipped_steps": sum(point.skipped for point in points) or None,
    }
    return {name: value for name, value in summary.items() if value is not None}


def in_words(run: Run, points: Sequence[Point]) -> str:
    """Say what `summarised` finds."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.4g}" for name, value in summarised(run, points).items()
    )


class Bar(Observer):
    """The progress bar of a run in a terminal, and below it a line with its latest figures."""

    def __init__(self, run: Run, console: Console) -> None:
        self._points: deque[Point] = deque(maxlen=WINDOW)
        self._bar = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metric]}"),
        )
        self._task = self._bar.add_task(
            run.name, total=run.total_steps, completed=run.step, metric=""
        )
        self._line = Text()
        self._live = Live(Group(self._bar, self._line), console=console)
        self._live.start()

    def step(self, run: Run, point: Point) -> None:
        """Advance the bar."""
        self._points.append(point)
        self._bar.update(self._task, completed=point.step)
        self._line.plain = f"{'':10}{in_words(run, self._points)}"

    def evaluation(self, run: Run, score: Score) -> None:
        """Show the primary metric; a target that is reached ends the bar before the last step."""
        metric, end = primary(run.task.metrics), run.step if run.done else run.total_steps
        self._bar.update(
            self._task, total=end, metric=f"{metric.word} {metric.text(score.value(metric.name))}"
        )

    def close(self) -> None:
        """Leave the bar as it is, without the figures."""
        self._live.update(self._bar)
        self._live.stop()


class Lines(Observer):
    """Lines printed every `log_interval` steps and after evaluations, if output is no terminal."""

    def __init__(self, run: Run, console: Console) -> None:
        self._points: deque[Point] = deque(maxlen=run.recipe.log_interval or 1)
        self._say = printer(console)

    def step(self, run: Run, point: Point) -> None:
        """Print a line if it is time."""
        self._points.append(point)
        if run.recipe.log_interval is not None and run.step % run.recipe.log_interval == 0:
            self._say(f"{run.name}: {place(run)}, {in_words(run, self._points)}")

    def evaluation(self, run: Run, score: Score) -> None:
        """Print the primary metric and the loss."""
        metric = primary(run.task.metrics)
        said = [
            f"{score.seconds:.1f} s",
            f"{metric.word} {metric.text(score.metrics[metric.name])}",
        ]
        if score.averaged is not None:
            said.append(f"of the averaged weights {metric.text(score.averaged[metric.name])}")
        if metric.name != "loss":
            said.append(f"held-out loss {score.metrics['loss']:.4g}")
        self._say(f"{run.name}: {place(run)}, {', '.join(said)}")


def place(run: Run) -> str:
    """Say how far a training is, after one step or more: its step, and its epoch or its phase."""
    done, phases = f"step {run.step} of {run.total_steps}", run.recipe.phases
    if not phases:
        return f"{done}, epoch {run.step / run.task.steps_per_epoch:.4g}"
    ends = itertools.accumulate(phase.steps for phase in phases)
    return f"{done}, phase {1 + sum(end < run.step for end in ends)} of {len(phases)}"
