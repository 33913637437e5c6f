"""A profile of a few steps in the middle of a training."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch has no __all__ there
from torch.profiler import (
    ProfilerActivity,
    profile,
    record_function,
    schedule,
    supported_activities,
)

from torch_thor.errors import require
from torch_thor.files import whole_file, writing
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.printing import cell, milliseconds, printer
from torch_thor.training.loop import Observer, Point, Run

# steps of the process that are never profiled: they compile, select kernels and fill caches
FIRST = 5
# first steps of the profile, which are discarded: they contain the start of the profiler
WARM_UP = 1
ACTIVE = 6  # recorded steps: one refresh and five ordinary steps, where refreshes are far apart
ROWS = 15  # operations in the table
BETWEEN = "between steps"  # the name of evaluations and checkpoints in the trace


class Profiler(Observer):
    """An observer that profiles a few steps from the next refresh on.

    It writes a Chrome trace, and prints the slowest operations.

    What other observers do before it between the steps is in the trace, but not in the table.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self._seen, self._refreshed = 0, False
        self._points: list[Point] = []  # of the profile
        self._profile: profile | None = None  # while it runs
        self._running, self._between = ExitStack(), ExitStack()

    def step(self, run: Run, point: Point) -> None:
        """Record the step; what follows is between steps."""
        self._seen, self._refreshed = self._seen + 1, point.refresh
        if self._profile is not None:
            self._points.append(point)
            self._between.enter_context(record_function(BETWEEN))

    def end_of_step(self, run: Run) -> None:
        """Start the profile if it is time, go on with it, or end it."""
        self._between.close()
        running = self._profile
        if running is None:
            if not self._points and self._is_time(run):
                cycle = schedule(wait=0, warmup=WARM_UP, active=ACTIVE, repeat=1)
                self._profile = self._running.enter_context(profile(schedule=cycle))
        elif run.done or len(self._points) == WARM_UP + ACTIVE:
            self.close()
            self._write(running, self._points[WARM_UP:])
        else:
            running.step()
        if run.done and len(self._points) <= WARM_UP:
            printer(self.console)(
                f"nothing was profiled: the training had only {self._seen} more steps"
            )

    def close(self) -> None:
        """Stop without writing an incomplete profile."""
        self._between.close()
        self._running.close()
        self._profile = None

    def _is_time(self, run: Run) -> bool:
        left, optimizer = run.total_steps - run.step, run.optimizer
        if left <= WARM_UP + ACTIVE or self._seen < FIRST:
            return WARM_UP < left <= WARM_UP + ACTIVE
        if not isinstance(optimizer, CurvatureOptimizer) or all(
            layer.stopped for layer in optimizer.curvature.values()
        ):
            return True
        ahead = min(group["next_refresh"] - group["step"] for group in optimizer.param_groups)
        return ahead == WARM_UP or (ahead == 0 and self._refreshed)  # or every step is a refresh

    def _write(self, finished: profile, points: list[Point]) -> None:
        if not points:
            return
        path = self.folder / f"steps-{points[0].step:08d}-{points[-1].step:08d}.json"
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as temporary:
                finished.export_chrome_trace(str(temporary))
                # C++ code writes the file; it logs errors instead of raising them
                require(
                    temporary.exists(),
                    f"{path} cannot be written: check its disk, then continue with --resume",
                )
        self.console.print(slowest(finished, points))
        printer(self.console)(
            f"The trace is {path}: open it in ui.perfetto.dev or chrome://tracing"
        )


def slowest(finished: profile, points: list[Point]) -> Table:
    """Make a table of operations by their own time, without that of operations that they call."""
    device = (
        "self_device_time_total"
        if ProfilerActivity.CUDA in supported_activities()
        else "self_cpu_time_total"
    )
    calls, times = Counter[str](), Counter[str]()
    for event in finished.events() or []:
        # a kernel's time is already counted for the operation that has launched it
        if (
            event.device_type == DeviceType.CPU
            and not event.key.startswith("ProfilerStep")
            and _in_step(event)
        ):
            calls[event.key] += 1
            times[event.key] += getattr(event, device)
    total, refreshes = sum(times.values()) or 1, sum(point.refresh for point in points)
    table = Table(
        title=f"Steps {points[0].step} to {points[-1].step}, {refreshes} of {len(points)} with a "
        "refresh",
        title_justify="left",
    )
    table.add_column("operation", overflow="ellipsis", no_wrap=True, max_width=48)
    for heading in ("calls", "GPU time" if "device" in device else "CPU time", "share"):
        table.add_column(heading, justify="right")
    for name, time in times.most_common(ROWS):
        table.add_row(cell(name), str(calls[name]), milliseconds(time / 1e6), f"{time / total:.1%}")
    return table


def _in_step(event: Any) -> bool:
    while event is not None and event.key != BETWEEN:
        event = event.cpu_parent
    return event is None
