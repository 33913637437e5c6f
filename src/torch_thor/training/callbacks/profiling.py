"""A profile of a few steps in the middle of a training, which then continues."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch._C._autograd import DeviceType
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

UNWATCHED = 5  # first steps of the process: they compile, choose kernels and fill caches
WARM_UP = 1  # steps that pay for starting the profiler; thrown away
ACTIVE = 6  # steps in the profile: a refresh and five ordinary ones where refreshes are far apart
ROWS = 15
BETWEEN = "between steps"  # evaluation and checkpoints, as the trace calls them


class Profiler(Callback):
    """Profiles a few steps from the next refresh on, writes a Chrome trace and shows where the time went.

    Where no refresh comes any more, the steps are ordinary ones. It must be the last of the callbacks: what the others
    do is between the steps.

    Args:
        folder: Where the trace goes, as `steps-00000021-00000026.json`.
        console: Where a table of the operations that took longest goes.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self._seen = 0
        self._profile: profile | None = None
        self._between: record_function | None = None
        self._points: list[StepPoint] = []
        self._done = False

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Look at the step, and end the profile if it was the last one.

        Args:
            run: The training.
            point: What the step measured.
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
        """Begin or go on.

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
        """Write what there is if training has ended before the profile was complete.

        Args:
            run: The training.
        """
        self._end()
        if not self._done:
            printer(self.console)(f"nothing was profiled: training went on for {self._seen} steps only")

    def close(self) -> None:
        """Stop profiling; what was not complete is not written."""
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
        if self._seen < UNWATCHED:
            return False
        refresh = steps_to_refresh(run.optimizer)
        always = refresh == 0 and run.record.steps[-1].refresh  # one refresh after the other
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
                # written by C++ code, which logs an error and does not raise
                require(temporary.exists(), f"{path} cannot be written: {MAKE_ROOM}")
        self.console.print(top_operations(finished, points))
        printer(self.console)(f"The trace is {path}: open it in ui.perfetto.dev or chrome://tracing")


def top_operations(finished: profile, points: list[StepPoint]) -> Table:
    """Make a table of the operations that the steps spent their time in.

    Args:
        finished: The profile.
        points: The steps in it.

    Returns:
        Operations by the time that they themselves took, without those that they called.
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
        if event.device_type != DeviceType.CPU:  # a kernel: its time is also that of the operation that started it
            continue
        above: FunctionEvent | None = event
        while above is not None and above.key != BETWEEN:
            above = above.cpu_parent
        if above is None and not event.key.startswith("ProfilerStep"):
            yield event
