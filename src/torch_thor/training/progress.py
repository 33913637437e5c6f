"""The progress of a training: a live bar in a terminal, printed lines otherwise."""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.training.loop import Observer, Point, Run, Score
from torch_thor.training.printing import milliseconds, printer
from torch_thor.training.tasks.task import primary

WINDOW = 100  # the bar describes this many latest steps
REFRESHES = 20  # the time of a refresh step is the median of this many latest ones, which may be far apart


def summarised(run: Run, points: Sequence[Point]) -> dict[str, float | None]:
    """Summarise consecutive steps of a run by name: means over all, medians of durations, and settings of the last."""
    seconds, terms, waited = (sum(getattr(point, name) for point in points) for name in ("duration", "terms", "waited"))
    losses = [point.loss for point in points if math.isfinite(point.loss)]
    ordinary, refresh = ([point.duration for point in points if point.refresh == kind] for kind in (False, True))
    skipped = sum(point.skipped for point in points)
    return {
        "loss": fmean(losses) if losses else None,
        "lr": points[-1].lr,
        "damping": points[-1].damping,
        f"{run.task.unit}_per_second": terms / seconds if seconds else None,
        "ordinary_step_seconds": median(ordinary) if ordinary else None,
        "refresh_step_seconds": median(refresh) if refresh else None,
        "data_wait_seconds": waited / len(points),
        "skipped": skipped if skipped or run.recipe.precision == "fp16" else None,
    }


class _Figures(Observer):
    """Describes the latest steps in words."""

    def __init__(self, window: int) -> None:
        self._points: deque[Point] = deque(maxlen=window)
        self._refreshes: deque[float] = deque(maxlen=REFRESHES)

    def step(self, run: Run, point: Point) -> None:
        self._points.append(point)
        if point.refresh:
            self._refreshes.append(point.duration)

    def figures(self, run: Run) -> str:
        loss, lr, damping, rate, ordinary, _, waited, skipped = summarised(run, self._points).values()
        curved = run.optimizer.curvature if isinstance(run.optimizer, CurvatureOptimizer) else {}
        stopped = [layer.stopped for layer in curved.values()]
        mean = sum(point.duration for point in self._points) / len(self._points)
        said = [
            "loss not finite" if loss is None else f"loss {loss:.4g}",
            f"lr {lr:.4g}",
            damping is not None and f"damping {damping:.4g}",
            rate is not None and f"{rate:.4g} {run.task.unit}/s",
            ordinary is not None and f"step {milliseconds(ordinary)}",
            bool(self._refreshes) and f"refresh step {milliseconds(median(self._refreshes))}",
            bool(waited and mean) and f"{(waited or 0) / mean:.0%} waiting for data",
            bool(stopped) and f"stopped layers {sum(stopped)} of {len(stopped)}",
            bool(skipped) and f"{skipped} of {len(self._points)} steps skipped",
        ]
        return ", ".join(words for words in said if words)


class Bar(_Figures):
    """The progress bar of a run, and below it a line with its latest figures.

    Args:
        run: The run.
        console: A terminal.
    """

    def __init__(self, run: Run, console: Console) -> None:
        super().__init__(WINDOW)
        columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[metric]}"))
        self._task = self._bar.add_task(run.name, total=run.total_steps, completed=run.step, metric="")
        if run.score is not None:
            self.evaluation(run, run.score)
        self._line = Text()
        self._live = Live(Group(self._bar, self._line), console=console)
        self._live.start()

    def step(self, run: Run, point: Point) -> None:
        """Advance the bar."""
        super().step(run, point)
        self._bar.update(self._task, completed=point.step)
        self._line.plain = f"{'':10}{self.figures(run)}"

    def evaluation(self, run: Run, score: Score) -> None:
        """Show the primary metric."""
        metric = primary(run.task.metrics)
        self._bar.update(self._task, metric=f"{metric.word} {metric.text(score.value(metric.name))}")

    def end_of_step(self, run: Run) -> None:
        """Show the run as finished, also if it has reached its target before the last step."""
        if run.done:
            self._bar.update(self._task, total=run.step)

    def close(self) -> None:
        """Leave the bar as it is, without the figures."""
        self._live.update(self._bar)
        self._live.stop()


class Lines(_Figures):
    """Prints a line at regular intervals and after each evaluation, for outputs that are no terminal.

    Args:
        run: The run; a line summarises `log_interval` steps, and None prints those of the evaluations only.
        console: Where the lines are printed.
    """

    def __init__(self, run: Run, console: Console) -> None:
        super().__init__(run.recipe.log_interval or 1)
        self._say = printer(console)

    def step(self, run: Run, point: Point) -> None:
        """Print a line if it is time."""
        super().step(run, point)
        if run.recipe.log_interval is not None and run.step % run.recipe.log_interval == 0:
            self._say(f"{run.name}: {place(run)}, {self.figures(run)}")

    def evaluation(self, run: Run, score: Score) -> None:
        """Print the primary metric and the loss."""
        metric = primary(run.task.metrics)
        said = [f"{score.seconds:.1f} s", f"{metric.word} {metric.text(score.metrics[metric.name])}"]
        if score.averaged is not None:
            said.append(f"of the averaged weights {metric.text(score.averaged[metric.name])}")
        if metric.name != "loss":
            said.append(f"test loss {score.metrics['loss']:.4g}")
        self._say(f"{run.name}: {place(run)}, {', '.join(said)}")


def place(run: Run) -> str:
    """Say how far a training is, after one step or more: its step, and its epoch or its phase."""
    done, phases = f"step {run.step} of {run.total_steps}", run.recipe.phases
    if not phases:
        return f"{done}, epoch {run.step / run.task.steps_per_epoch:.4g}"
    ends = itertools.accumulate(phase.steps for phase in phases)
    return f"{done}, phase {1 + sum(end < run.step for end in ends)} of {len(phases)}"
