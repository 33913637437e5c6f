"""What people watch while a run goes on: TensorBoard and the live bar."""

from pathlib import Path

from rich.progress import Progress, TaskID
from torch.utils.tensorboard import SummaryWriter

from torch_thor.training.loop import Callback, Run
from torch_thor.training.record import EvalPoint, StepPoint


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
