"""A profile of a few steps in the middle of a training."""

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch has no __all__ there
from torch.autograd.profiler_util import FunctionEvent
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function, schedule, supported_activities

from torch_thor.files import MAKE_ROOM, whole_file, writing
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.training.errors import require
from torch_thor.training.loop import Observer, Point, Run
from torch_thor.training.printing import cell, milliseconds, printer

FIRST = 5  # steps of the process that are never profiled: they compile, select kernels and fill caches
WARM_UP = 1  # first steps of the profile, which are discarded: they contain the start of the profiler
ACTIVE = 6  # recorded steps: one refresh and five ordinary steps, where refreshes are far apart
ROWS = 15  # operations in the table
BETWEEN = "between steps"  # the name of evaluations and checkpoints in the trace


class Profiler(Observer):
    """Profiles a few steps from the next refresh on, writes a Chrome trace, and prints the slowest operations.

    If there will be no further refresh, it profiles ordinary steps. What evaluations and other observers do between
    them is not in the table, if this is the last of the observers.

    Args:
        folder: The folder of the trace, whose name is of the form `steps-00000021-00000026.json`.
        console: Where the table of operations is printed.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self._seen, self._refreshed, self._done = 0, False, False
        self._profile: profile | None = None
        self._between: record_function | None = None
        self._points: list[Point] = []

    def step(self, run: Run, point: Point) -> None:
        """Record the step; what follows is between steps."""
        self._seen, self._refreshed = self._seen + 1, point.refresh
        if self._profile is not None:
            self._points.append(point)
            if len(self._points) == WARM_UP + ACTIVE:
                self._end()
                return
            self._between = record_function(BETWEEN)
            self._between.__enter__()

    def end_of_step(self, run: Run) -> None:
        """Start the profile if it is time, go on with it, or end it."""
        if self._profile is not None:
            self._leave()
            if run.done:
                self._end()
            else:
                self._profile.step()
        elif not self._done and self._is_time(run):
            cycle = schedule(wait=0, warmup=WARM_UP, active=ACTIVE, repeat=1)
            self._profile = profile(schedule=cycle, on_trace_ready=self._write)
            self._profile.start()
        if run.done and not self._done:
            printer(self.console)(f"nothing was profiled: the training had only {self._seen} more steps")

    def close(self) -> None:
        """Stop without writing an incomplete profile."""
        self._done = True
        self._leave()
        self._end()

    def _leave(self) -> None:
        between, self._between = self._between, None
        if between is not None:
            between.__exit__(None, None, None)

    def _end(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()

    def _is_time(self, run: Run) -> bool:
        left = run.total_steps - run.step
        if left <= WARM_UP + ACTIVE:
            return left > WARM_UP
        refresh = steps_to_refresh(run.optimizer)
        always = refresh == 0 and self._refreshed  # every step is a refresh
        return self._seen >= FIRST and (refresh is None or refresh == WARM_UP or refresh >= left or always)

    def _write(self, finished: profile) -> None:
        points = self._points[WARM_UP:]
        if self._done or not points:
            return
        self._done = True
        path = self.folder / f"steps-{points[0].step:08d}-{points[-1].step:08d}.json"
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as temporary:
                finished.export_chrome_trace(str(temporary))
                # C++ code writes the file; it logs errors instead of raising them
                require(temporary.exists(), f"{path} cannot be written: {MAKE_ROOM}")
        self.console.print(slowest(finished, points))
        printer(self.console)(f"The trace is {path}: open it in ui.perfetto.dev or chrome://tracing")


def steps_to_refresh(optimizer: Optimizer) -> int | None:
    """Return the number of steps before the next refresh; None if there will be none."""
    layers = list(optimizer.curvature.values()) if isinstance(optimizer, CurvatureOptimizer) else []
    if any(layer.due for layer in layers):
        return 0
    if all(layer.stopped for layer in layers):
        return None
    return min(int(group["next_refresh"] - group["step"]) for group in optimizer.param_groups)


def slowest(finished: profile, points: list[Point]) -> Table:
    """Make a table of the operations by their own time, without that of the operations that they call."""
    device = "self_device_time_total" if ProfilerActivity.CUDA in supported_activities() else "self_cpu_time_total"
    calls, times = Counter[str](), Counter[str]()
    for event in finished.events() or []:
        if _in_step(event):
            calls[event.key] += 1
            times[event.key] += getattr(event, device)
    total, refreshes = sum(times.values()) or 1, sum(point.refresh for point in points)
    title = f"Steps {points[0].step} to {points[-1].step}, {refreshes} of {len(points)} with a refresh"
    table = Table(title=title, title_justify="left")
    table.add_column("operation", overflow="ellipsis", no_wrap=True, max_width=48)
    for heading in ("calls", "GPU time" if "device" in device else "CPU time", "share"):
        table.add_column(heading, justify="right")
    for name, time in times.most_common(ROWS):
        table.add_row(cell(name), str(calls[name]), milliseconds(time / 1e6), f"{time / total:.1%}")
    return table


def _in_step(event: FunctionEvent) -> bool:
    # a kernel's time is already counted for the operation that has launched it
    if event.device_type != DeviceType.CPU or event.key.startswith("ProfilerStep"):
        return False
    above: FunctionEvent | None = event
    while above is not None and above.key != BETWEEN:
        above = above.cpu_parent
    return above is None
