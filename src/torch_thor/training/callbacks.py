"""What happens around the loop: metrics on disk, TensorBoard, checkpoints, signals, the live bar."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
from rich.progress import Progress, TaskID
from torch.utils.tensorboard import SummaryWriter

from torch_thor.training import checkpoint
from torch_thor.training.errors import StoppedError, UserError
from torch_thor.training.loop import Callback, Run
from torch_thor.training.record import EvalPoint, Record, StepPoint, from_lines, to_line


class MetricsFile(Callback):
    """Writes `metrics.jsonl`: a line for each step and each evaluation.

    A resumed run first drops the lines that are newer than its checkpoint.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def before_training(self, run: Run) -> None:
        """Write what the run already knows, then stand ready to append.

        Args:
            run: The training.
        """
        points: list[StepPoint | EvalPoint] = [*run.record.steps, *run.record.evaluations]
        points.sort(key=lambda point: (point.step, isinstance(point, EvalPoint)))
        temporary = self.path.with_suffix(".writing")
        temporary.write_text("".join(json.dumps(to_line(point)) + "\n" for point in points), encoding="utf-8")
        temporary.rename(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Write the step.

        Args:
            run: The training.
            point: What the step measured.
        """
        self._write(point)

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Write the evaluation.

        Args:
            run: The training.
            point: What the evaluation measured.
        """
        self._write(point)

    def sync(self) -> None:
        """Flush to the disk: a checkpoint must never know more steps than this file."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, point: StepPoint | EvalPoint) -> None:
        assert self._file is not None
        self._file.write(json.dumps(to_line(point)) + "\n")


def read_metrics(path: Path) -> Record:
    """Read `metrics.jsonl`.

    Args:
        path: The file.

    Returns:
        Its record; a last line that a killed run left unfinished is not in it.

    Raises:
        UserError: If the file is missing, or a line in the middle is no metrics line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is unfinished
        return from_lines([json.loads(line) for line in lines])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): start again with --overwrite or --out") from error


class TensorBoard(Callback):
    """Scalars for TensorBoard.

    Args:
        folder: Where the event files go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None

    def before_training(self, run: Run) -> None:
        """Open the writer; scalars newer than the checkpoint are purged.

        Args:
            run: The training.
        """
        self._writer = SummaryWriter(str(self.folder), purge_step=run.step + 1)

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Write the step.

        Args:
            run: The training.
            point: What the step measured.
        """
        assert self._writer is not None
        self._writer.add_scalar("train/loss", point.loss, point.step)
        self._writer.add_scalar("train/lr", point.lr, point.step)
        self._writer.add_scalar("train/step_seconds", point.duration, point.step)

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Write the evaluation.

        Args:
            run: The training.
            point: What the evaluation measured.
        """
        assert self._writer is not None
        for name in ("loss", "top1", "top5"):
            self._writer.add_scalar(f"test/{name}", getattr(point, name), point.step)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()


class StopSignal:
    """Remembers that SIGINT or SIGTERM came; a second one acts at once, as if this were not here."""

    def __init__(self) -> None:
        self.received = False

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        """Listen while the block runs.

        Yields:
            This object.
        """
        before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def handle(number: int, frame: FrameType | None) -> None:
            self.received = True
            signal.signal(number, before[number])

        for number in before:
            signal.signal(number, handle)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Checkpoints(Callback):
    """Saves every so many steps, at the end, and when a signal asks to stop.

    Args:
        folder: Where checkpoints stand.
        metrics: The metrics file, flushed before each checkpoint.
        stop: The signal.
        interval: Steps between checkpoints; `None` saves after each epoch.
        keep: Newest checkpoints to keep.
        optimizer: The optimizer's name in the recipe.
        recipe: The recipe as run, in YAML.
    """

    def __init__(
        self,
        folder: Path,
        metrics: MetricsFile,
        stop: StopSignal,
        *,
        interval: int | None,
        keep: int,
        optimizer: str,
        recipe: str,
    ) -> None:
        self.folder, self.metrics, self.stop = folder, metrics, stop
        self.interval, self.keep, self.optimizer, self.recipe = interval, keep, optimizer, recipe

    def at_boundary(self, run: Run) -> None:
        """Save if it is time, stop if asked.

        Args:
            run: The training.

        Raises:
            StoppedError: If a signal came; the checkpoint is written by then.
        """
        due = run.step % (self.interval or run.steps_per_epoch) == 0 or run.step == run.total_steps
        stopping = self.stop.received and run.step < run.total_steps
        if due or stopping:
            self.metrics.sync()
            checkpoint.save(
                self.folder,
                run.model,
                capture_state(run),
                step=run.step,
                optimizer=self.optimizer,
                recipe=self.recipe,
                keep=self.keep,
            )
        if stopping:
            raise StoppedError(run.step)


def capture_state(run: Run) -> dict[str, object]:
    """Everything but the weights that decides how a run goes on.

    Args:
        run: The training.

    Returns:
        Tensors and plain values. The order of the data is a function of (seed, epoch): the step is enough.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "optimizer": run.optimizer.state_dict(),
        "step": run.step,
        "seconds": run.seconds,
        "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
    }


def restore(run: Run, saved: checkpoint.Checkpoint, metrics: Path) -> None:
    """Put a run where a checkpoint left it.

    It then goes on bit for bit, as long as the machine and `torch.get_num_threads()` are the same: sums in floating
    point depend on how they are divided.

    Args:
        run: A new training, of the same recipe.
        saved: The checkpoint.
        metrics: The run's `metrics.jsonl`.

    Raises:
        UserError: If the metrics file knows fewer steps than the checkpoint.
    """
    record = read_metrics(metrics).up_to(saved.step)
    if len(record.steps) != saved.step:
        raise UserError(f"{metrics} holds {len(record.steps)} of {saved.step} steps: use --overwrite or another --out")
    saved.load_weights(run.model)
    state = saved.load_state()
    run.optimizer.load_state_dict(state["optimizer"])
    run.step, run.seconds, run.record = state["step"], state["seconds"], record
    torch.set_rng_state(state["rng"]["cpu"])
    if torch.cuda.is_available() and state["rng"]["cuda"]:
        torch.cuda.set_rng_state_all(state["rng"]["cuda"])


class Bar(Callback):
    """One line of a live Rich progress display; without a terminal, one printed line for each evaluation.

    Args:
        progress: The display, with the fields `loss` and `accuracy`.
        task: This run's line in it.
    """

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task = progress, task

    def before_training(self, run: Run) -> None:
        """Show where the run starts.

        Args:
            run: The training.
        """
        self.progress.reset(self.task, total=run.total_steps, completed=run.step)

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Move on by one step.

        Args:
            run: The training.
            point: What the step measured.
        """
        self.progress.update(self.task, completed=point.step, loss=f"loss {point.loss:.3f}")

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Show the accuracy.

        Args:
            run: The training.
            point: What the evaluation measured.
        """
        self.progress.update(self.task, accuracy=f"accuracy {point.top1:.2%}")
        if not self.progress.console.is_terminal:
            name = self.progress.tasks[self.task].description
            done = f"step {point.step} of {run.total_steps}, {point.seconds:.1f} s"
            self.progress.console.print(f"{name}: {done}, accuracy {point.top1:.2%}")
