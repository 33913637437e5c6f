"""A profile of a few steps in the middle of a training."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch has no __all__ there
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function, schedule, supported_activities

from torch_thor.files import whole_file
from torch_thor.training.callbacks.progress import milliseconds
from torch_thor.training.engine.history import StepPoint
from torch_thor.training.engine.loop import Callback, Run
from torch_thor.training.engine.refreshes import steps_to_refresh
from torch_thor.training.errors import require
from torch_thor.training.output_files import MAKE_ROOM, writing
from torch_thor.training.printing import cell, printer

SKIPPED = 5  # first steps of the process, which are never profiled: they compile, select kernels and fill caches
WARM_UP = 1  # first steps of the profile, which are discarded: they contain the start of the profiler
ACTIVE = 6  # recorded steps: one refresh and five ordinary steps, where refreshes are far apart
ROWS = 15  # operations in the table
BETWEEN = "between steps"  # the name of evaluations and checkpoints in the trace


class Profiler(Callback):
    """Profiles a few steps from the next refresh on, writes a Chrome trace, and prints the slowest operations.

    If there will be no further refresh, it profiles ordinary steps. It must be the last of the callbacks, so that the
    time of the others counts as time between steps.

    Args:
        folder: The folder of the trace, whose name is of the form `steps-00000021-00000026.json`.
        console: Where the table of operations is printed.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self._seen = 0
        self._profile: profile | None = None
        self._between: record_function | None = None
        self._points: list[StepPoint] = []
        self._done = False

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Record the step, and end the profile if it was the last one.

        Args:
            run: The training.
            point: The measurements of the step.
        """
        self._seen += 1
        if self._profile is None:
            return
        self._points.append(point)
        if len(self._points) == WARM_UP + ACTIVE:
            self._end()
        else:
            self._between = record_function(BETWEEN)
            self._between.__enter__()

    def at_boundary(self, run: Run) -> None:
        """Start the profiler when it is time, or continue with the next step.

        Args:
            run: The training.
        """
        if self._profile is not None:
            self._leave()
            self._profile.step()
        elif not self._done and self._is_time(run):
            cycle = schedule(wait=0, warmup=WARM_UP, active=ACTIVE, repeat=1)
            self._profile = profile(schedule=cycle, on_trace_ready=self._write)
            self._profile.start()

    def after_training(self, run: Run) -> None:
        """Write an incomplete profile if the training has ended.

        Args:
            run: The training.
        """
        self._end()
        if not self._done:
            printer(self.console)(f"nothing was profiled: the training had only {self._seen} more steps")

    def close(self) -> None:
        """Stop profiling without writing an incomplete profile."""
        self._done = True
        self._end()

    def _leave(self) -> None:
        if self._between is not None:
            self._between.__exit__(None, None, None)
            self._between = None

    def _end(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            self._leave()
            running.stop()

    def _is_time(self, run: Run) -> bool:
        left = run.total_steps - run.step
        if left <= WARM_UP + ACTIVE:
            return left > WARM_UP
        if self._seen < SKIPPED:
            return False
        refresh = steps_to_refresh(run.optimizer)
        always = refresh == 0 and run.record.steps[-1].refresh  # every step is a refresh
        return refresh is None or refresh == WARM_UP or refresh >= left or always

    def _write(self, finished: profile) -> None:
        points = self._points[WARM_UP:]
        if not points or self._done:
            return
        self._done = True
        path = self.folder / f"steps-{points[0].step:08d}-{points[-1].step:08d}.json"
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as temporary:
                finished.export_chrome_trace(str(temporary))
                # C++ code writes the file; it logs errors instead of raising them
                require(temporary.exists(), f"{path} cannot be written: {MAKE_ROOM}")
        self.console.print(top_operations(finished, points))
        printer(self.console)(f"The trace is {path}: open it in ui.perfetto.dev or chrome://tracing")


def top_operations(finished: profile, points: list[StepPoint]) -> Table:
    """Make a table of the operations that took the most time.

    Args:
        finished: The profile.
        points: The profiled steps.

    Returns:
        The operations by their own time, without the time of the operations that they called.
    """
    on_device = ProfilerActivity.CUDA in supported_activities()
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for event in _in_steps(finished):
        calls[event.key] += 1
        seconds[event.key] += (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
    total = sum(seconds.values())
    refreshes = sum(point.refresh for point in points)
    table = Table(
        title=f"Steps {points[0].step} to {points[-1].step}, {refreshes} of {len(points)} with a refresh",
        title_justify="left",
    )
    table.add_column("operation", overflow="ellipsis", no_wrap=True, max_width=48)
    for column in ("calls", "GPU time" if on_device else "CPU time", "share"):
        table.add_column(column, justify="right")
    for name in sorted(seconds, key=lambda name: -seconds[name])[:ROWS]:
        share = f"{seconds[name] / total:.1%}" if total else ""
        table.add_row(cell(name), str(calls[name]), milliseconds(seconds[name]), share)
    return table


def _in_steps(finished: profile) -> Iterator[FunctionEvent]:
    for event in finished.events() or []:
        if (
            event.device_type != DeviceType.CPU
        ):  # a kernel, whose time is already counted for the operation that launched it
            continue
        above: FunctionEvent | None = event
        while above is not None and above.key != BETWEEN:
            above = above.cpu_parent
        if above is None and not event.key.startswith("ProfilerStep"):
            yield event
