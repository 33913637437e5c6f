"""Scalars for TensorBoard.

TensorBoard draws 1000 randomly chosen points of a curve, and hundreds of thousands of steps would make a file of
hundreds of megabytes. A point therefore summarises several steps: `log_interval`, or fewer in short trainings, whose
curves would otherwise have fewer than `FULL_CURVE` points. `metrics.jsonl` contains every step.
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
    """Writes scalars for TensorBoard. Every method raises a `UserError` if they cannot be written.

    Args:
        folder: The folder of the event files.
        interval: Largest number of steps between points; `None` lets the length of the training decide.
    """

    def __init__(self, folder: Path, interval: int | None) -> None:
        self.folder, self.interval = folder, interval
        self._writer: SummaryWriter | None = None
        self._every = 1
        self._stopped = 0

    def before_training(self, run: Run) -> None:
        """Open the writer, and purge scalars that are newer than the checkpoint.

        Args:
            run: The training.
        """
        self._every = max(1, min(self.interval or run.total_steps, run.total_steps // FULL_CURVE))
        written = run.step // self._every * self._every
        self._stopped = sum(point.decision == "stop" for point in run.record.refreshes if point.step <= written)
        with writing(self.folder):
            self._writer = SummaryWriter(str(self.folder), purge_step=run.step + 1)

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Write the metrics of the evaluation.

        Args:
            run: The training.
            point: The metrics of the evaluation.
        """
        for name, value in point.metrics.items():
            self._add(f"test/{name}", value, point.step)
            if point.averaged is not None:
                self._add(f"averaged/{name}", point.averaged[name], point.step)

    def at_boundary(self, run: Run) -> None:
        """Write a point that summarises the steps since the previous one, if it is time.

        Args:
            run: The training.
        """
        if run.step % self._every == 0 or run.done:
            self._add_point(run)

    def close(self) -> None:
        """Flush and close the writer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with writing(self.folder):
                writer.close()

    def _add_point(self, run: Run) -> None:
        # from the record, on fixed multiples of the interval: a resumed run writes the same points as an uninterrupted
        # one
        recent = run.record.since((run.step - 1) // self._every * self._every)
        latest, speed = recent.steps[-1], throughput(recent.steps)
        train = {
            "loss": speed.loss,
            "lr": latest.lr,
            "damping": latest.damping,
            f"{run.task.unit}_per_second": speed.terms_per_second,
            "ordinary_step_seconds": speed.ordinary_seconds,
            "refresh_step_seconds": speed.refresh_seconds,
            "data_wait_seconds": speed.waited_seconds,
            "skipped": sum(p.skipped for p in recent.steps) if run.config.precision == "fp16" else None,
        }
        for name, value in train.items():
            self._add(f"train/{name}", value, run.step)
        if not curvature_of(run.optimizer):
            return
        decisions = [point.decision for point in recent.refreshes]
        self._stopped += decisions.count("stop")
        layers = {
            "refreshed": decisions.count("update"),
            "kept": decisions.count("keep"),
            "failed": decisions.count("failed"),
            "stopped": self._stopped,
        }
        for name, value in layers.items():
            self._add(f"thor/{name}", value, run.step)
        for layer, change in {point.layer: point.trace_change for point in recent.refreshes}.items():
            self._add(f"trace_change/{layer}", change, run.step)

    def _add(self, tag: str, value: float | None, step: int) -> None:
        assert self._writer is not None
        if value is not None:
            with writing(self.folder):
                self._writer.add_scalar(tag, value, step)
