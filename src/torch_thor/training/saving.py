"""When to save, what a checkpoint of a run holds, and how a run goes on from it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torch_thor.training import checkpoint
from torch_thor.training.errors import StoppedError, UserError
from torch_thor.training.loop import Callback, Run
from torch_thor.training.metrics import MetricsFile, read_metrics


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
