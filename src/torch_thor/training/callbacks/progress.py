"""The progress of a training: a live progress bar in a terminal, printed lines otherwise."""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from statistics import median

from rich.console import RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from torch_thor.training.engine.history import EvalPoint, RefreshPoint, StepPoint
from torch_thor.training.engine.loop import Callback, Run
from torch_thor.training.engine.refreshes import curvature_of
from torch_thor.training.engine.throughput import throughput
from torch_thor.training.printing import printer

WINDOW = 100  # the bar shows the loss, throughput and step time of this many latest steps
REFRESHES = 20  # the time of a refresh step is the median of this many latest ones, which may be far apart


class Display(Progress):
    """A progress bar for each optimizer, and below the active one a line with its latest figures.

    Each task of the display has two fields: `metric` is shown beside its bar, `figures` below it.
    """

    def __init__(self, **options: object) -> None:
        columns = (
            TextColumn("{task.description:>8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metric]}"),
        )
        super().__init__(*columns, **options)  # type: ignore[arg-type]

    def add_run(self, name: str) -> TaskID:
        """Add the bar of a run that has not begun.

        Args:
            name: The optimizer's name.

        Returns:
            The ID of its task in the display.
        """
        return self.add_task(name, start=False, total=None, metric="", figures="")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the parts of the display.

        Yields:
            The bars, then the figures of the active runs.
        """
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["figures"] and not task.finished:
                yield Padding(task.fields["figures"], (0, 0, 0, 9))


class _StepStatistics(Callback):
    """Counts refreshes and skipped steps over the whole run, and describes the latest steps in words."""

    def __init__(self) -> None:
        self.refresh_steps = 0
        self.skipped = 0
        self.decisions: Counter[str] = Counter()
        self.layers = 0
        self.refresh_durations: deque[float] = deque(maxlen=REFRESHES)

    def before_training(self, run: Run) -> None:
        """Count the earlier steps of a resumed run.

        Args:
            run: The training.
        """
        self.layers = len(curvature_of(run.optimizer))
        self.after_refresh(run, run.record.refreshes)
        for point in run.record.steps:
            self._count(point)

    def after_refresh(self, run: Run, points: Sequence[RefreshPoint]) -> None:
        """Count the decisions of the trace rule.

        Args:
            run: The training.
            points: The decisions.
        """
        self.decisions.update(point.decision for point in points)

    def _count(self, point: StepPoint) -> None:
        self.skipped += point.skipped
        if point.refresh:
            self.refresh_steps += 1
            self.refresh_durations.append(point.duration)

    def _figures(self, run: Run, steps: int) -> str:
        """Describe the latest steps, and the refreshes of the run so far."""
        points = run.record.since(run.step - steps).steps
        latest, speed = points[-1], throughput(points)
        refresh = median(self.refresh_durations) if self.refresh_durations else None
        said = [
            f"loss {'not finite' if speed.loss is None else format(speed.loss, '.4g')}",
            f"lr {latest.lr:.4g}",
            latest.damping is not None and f"damping {latest.damping:.4g}",
            speed.terms_per_second is not None and f"{speed.terms_per_second:.4g} {run.task.unit}/s",
            speed.ordinary_seconds is not None and f"step {milliseconds(speed.ordinary_seconds)}",
            refresh is not None and f"refresh step {milliseconds(refresh)}",
            f"{speed.waiting:.0%} waiting for data",
            self.layers > 0 and f"refreshes {self.refresh_steps}",
            self.layers > 0 and f"stopped layers {self.decisions['stop']} of {self.layers}",
            self.skipped > 0 and f"skipped steps {self.skipped}",
        ]
        return ", ".join(word for word in said if word)


class Bar(_StepStatistics):
    """The progress bar of one run.

    Args:
        display: The display.
        task: The ID of the run's task, from `Display.add_run`.
    """

    def __init__(self, display: Display, task: TaskID) -> None:
        super().__init__()
        self.display, self.task = display, task

    def before_training(self, run: Run) -> None:
        """Show the step at which the run starts.

        Args:
            run: The training.
        """
        super().before_training(run)
        self.display.reset(self.task, total=run.total_steps, completed=run.step)
        if run.record.evaluations:
            self.after_evaluation(run, run.record.evaluations[-1])

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Advance the bar by one step.

        Args:
            run: The training.
            point: The measurements of the step.
        """
        self._count(point)
        self.display.update(self.task, completed=point.step, figures=self._figures(run, WINDOW))

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Show the primary metric.

        Args:
            run: The training.
            point: The metrics of the evaluation.
        """
        self.display.update(self.task, metric=f"{run.primary.word} {run.primary.text(point.value)}")

    def after_training(self, run: Run) -> None:
        """Show the run as finished, also if it reached its target before the last step.

        Args:
            run: The training.
        """
        self.display.update(self.task, total=run.step)


class Lines(_StepStatistics):
    """Prints a line at regular intervals and after each evaluation, for log files and other outputs without a terminal.

    Args:
        display: Its console prints the lines.
        name: The optimizer's name.
        interval: Steps between lines, which a line summarises; `None` prints a line for each evaluation only.
    """

    def __init__(self, display: Display, name: str, interval: int | None) -> None:
        super().__init__()
        self.display, self.name, self.interval = display, name, interval

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Count the step.

        Args:
            run: The training.
            point: The measurements of the step.
        """
        self._count(point)

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Print the primary metric and the loss.

        Args:
            run: The training.
            point: The metrics of the evaluation.
        """
        metric = run.primary
        said = [f"{point.seconds:.1f} s", f"{metric.word} {metric.text(point.metrics[metric.name])}"]
        if point.averaged is not None:
            said.append(f"of the averaged weights {metric.text(point.averaged[metric.name])}")
        if metric.name != "loss":
            said.append(f"test loss {point.metrics['loss']:.4g}")
        self._say(run, ", ".join(said))

    def at_boundary(self, run: Run) -> None:
        """Print a progress line, if it is time. By now the refreshes of the step are counted.

        Args:
            run: The training.
        """
        if self.interval is not None and run.step % self.interval == 0:
            self._say(run, self._figures(run, self.interval))

    def _say(self, run: Run, what: str) -> None:
        printer(self.display.console)(f"{self.name}: {place(run)}, {what}")


def place(run: Run) -> str:
    """Say how far a training is.

    Args:
        run: The training, with one step done or more.

    Returns:
        Its step, and its epoch, or its phase where it has phases.
    """
    phases, done = run.config.phases, f"step {run.step} of {run.total_steps}"
    if not phases:
        return f"{done}, epoch {run.step / run.steps_per_epoch:.4g}"
    ends = itertools.accumulate(phase.steps for phase in phases)
    return f"{done}, phase {1 + sum(end < run.step for end in ends)} of {len(phases)}"


def milliseconds(seconds: float) -> str:
    """Format the duration of a step.

    Args:
        seconds: The duration, in seconds.

    Returns:
        Milliseconds, with one decimal below 100 ms.
    """
    return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f} ms"
