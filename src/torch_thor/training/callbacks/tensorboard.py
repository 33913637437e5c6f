"""Scalars for TensorBoard.

The viewer draws 1000 points of a curve, chosen at random, and hundreds of thousands of steps would make a file of
hundreds of megabytes. So a point sums up a stretch of steps: `log_interval`, or fewer in trainings so short that a
curve would have less than `FULL_CURVE` points. Every step is in `metrics.jsonl`.
"""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from torch_thor.training.engine.history import EvalPoint
from torch_thor.training.engine.loop import Callback, Run
from torch_thor.training.engine.refreshes import curvature_of
from torch_thor.training.engine.throughput import throughput
from torch_thor.training.output_files import writing

FULL_CURVE = 2000  # points


class TensorBoard(Callback):
    """Scalars for TensorBoard; every method raises a `UserError` where they cannot be written.

    Args:
        folder: Where the event files go.
        interval: Most steps between points; `None` leaves it to the length of the training.
    """

    def __init__(self, folder: Path, interval: int | None) -> None:
        self.folder, self.interval = folder, interval
        self._writer: SummaryWriter | None = None
        self._every = 1
        self._stopped = 0

    def before_training(self, run: Run) -> None:
        """Open the writer; scalars newer than the checkpoint are purged.

        Args:
            run: The training.
        """
        self._every = max(1, min(self.interval or run.total_steps, run.total_steps // FULL_CURVE))
        written = run.step // self._every * self._every
        self._stopped = sum(point.decision == "stop" for point in run.record.refreshes if point.step <= written)
        with writing(self.folder):
            self._writer = SummaryWriter(str(self.folder), purge_step=run.step + 1)

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Write the evaluation.

        Args:
            run: The training.
            point: What the evaluation measured.
        """
        for name, value in point.metrics.items():
            self._add(f"test/{name}", value, point.step)
            if point.averaged is not None:
                self._add(f"averaged/{name}", point.averaged[name], point.step)

    def at_boundary(self, run: Run) -> None:
        """Write the steps since the point before, if it is time.

        Args:
            run: The training.
        """
        if run.step % self._every == 0 or run.done:
            self._add_stretch(run)

    def close(self) -> None:
        """Flush and close."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with writing(self.folder):
                writer.close()

    def _add_stretch(self, run: Run) -> None:
        # from the record, and on a grid of steps: a resumed run writes what an uninterrupted one would have written
        stretch = run.record.since((run.step - 1) // self._every * self._every)
        latest, speed = stretch.steps[-1], throughput(stretch.steps)
        train = {
            "loss": speed.loss,
            "lr": latest.lr,
            "damping": latest.damping,
            f"{run.task.unit}_per_second": speed.terms_per_second,
            "ordinary_step_seconds": speed.ordinary_seconds,
            "refresh_step_seconds": speed.refresh_seconds,
            "data_wait_seconds": speed.waited_seconds,
            "skipped": sum(p.skipped for p in stretch.steps) if run.config.precision == "fp16" else None,
        }
        for name, value in train.items():
            self._add(f"train/{name}", value, run.step)
        if not curvature_of(run.optimizer):
            return
        decisions = [point.decision for point in stretch.refreshes]
        self._stopped += decisions.count("stop")
        layers = {
            "refreshed": decisions.count("update"),
            "kept": decisions.count("keep"),
            "failed": decisions.count("failed"),
            "stopped": self._stopped,
        }
        for name, value in layers.items():
            self._add(f"thor/{name}", value, run.step)
        for layer, change in {point.layer: point.trace_change for point in stretch.refreshes}.items():
            self._add(f"trace_change/{layer}", change, run.step)

    def _add(self, tag: str, value: float | None, step: int) -> None:
        assert self._writer is not None
        if value is not None:
            with writing(self.folder):
                self._writer.add_scalar(tag, value, step)
