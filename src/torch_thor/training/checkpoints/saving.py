"""Saving checkpoints during a training, and resuming a run from a checkpoint."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import torch

from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.training.callbacks.metrics_file import MetricsFile, parse_metrics
from torch_thor.training.checkpoints import best, checkpoint
from torch_thor.training.checkpoints.divided import save_divided, weight_parts
from torch_thor.training.checkpoints.manifest import METRICS
from torch_thor.training.checkpoints.optimizer_state import load_optimizer, split_state
from torch_thor.training.checkpoints.vocabulary import check_tokenizer, tokenizer_of
from torch_thor.training.engine import parallel, sharding
from torch_thor.training.engine.ending import is_lost_connection
from torch_thor.training.engine.history import History
from torch_thor.training.engine.loop import Callback, Run
from torch_thor.training.errors import StoppedError


class StopSignal:
    """Records that SIGINT or SIGTERM was received. A second signal has its usual effect."""

    def __init__(self) -> None:
        self.received = False

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        """Handle the signals while the block runs; outside of the main thread Python lets nobody handle any.

        Yields:
            This object.
        """
        numbers = (signal.SIGINT, signal.SIGTERM) if current_thread() is main_thread() else ()
        before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}

        def handle(number: int, frame: FrameType | None) -> None:
            self.received = True
            signal.signal(number, before[number])

        for number in before:
            signal.signal(number, handle)
        try:
            yield self
        except Exception as error:
            if is_lost_connection(error):  # torchrun ends this process by a signal, while it finds out what to report
                before = {}
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Checkpoints(Callback):
    """Saves checkpoints at regular intervals, at the end, when a signal stops the training, and of the best evaluation.

    Args:
        folder: The folder of the checkpoints.
        metrics: The metrics file, which is flushed before each checkpoint.
        stop: The record of a signal.
        interval: Steps between checkpoints; `None` saves after each epoch.
        keep: Number of newest checkpoints to keep.
        optimizer: The optimizer's name in the recipe.
        recipe: The recipe of the run, in YAML.
        keep_best: Whether to keep also the checkpoint of the best evaluation.
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
        keep_best: bool = False,
    ) -> None:
        self.folder, self.metrics, self.stop, self.keep_best = folder, metrics, stop, keep_best
        self.interval, self.keep, self.optimizer, self.recipe = interval, keep, optimizer, recipe

    def before_training(self, run: Run) -> None:
        """Keep the best checkpoint of a run that was killed before it could.

        Args:
            run: The training.
        """
        if self.keep_best:
            with parallel.agreed():
                if parallel.is_first():
                    best.keep_missing_best(self.folder, run.record)

    def at_boundary(self, run: Run) -> None:
        """Save a checkpoint if it is time, and stop after a signal. All processes call it; the first one writes.

        Args:
            run: The training.

        Raises:
            StoppedError: If any process has received a signal. The checkpoint has then been written.
        """
        due = run.step % (self.interval or run.steps_per_epoch) == 0 or run.done
        received = parallel.total([float(self.stop.received)], run.task.device)[0] > 0  # on any process
        stopping = received and not run.done
        is_best = self.keep_best and best.is_best(run.record, run.step)
        if due or stopping or is_best:
            with parallel.agreed():
                if parallel.is_first():
                    self.metrics.sync()
            newest = due or stopping  # a best one is not among these, which frequent evaluations would all replace
            path = self._save(run, *((self.folder, self.keep) if newest else (self.folder / checkpoint.BEST, 1)))
            with parallel.agreed():
                if parallel.is_first() and is_best:
                    (best.keep if newest else best.remove_others)(path)
        if stopping:
            raise StoppedError(run.step)

    def _save(self, run: Run, folder: Path, keep: int) -> Path:
        """Save a checkpoint. Every process must call it."""
        state = capture_state(run)
        average = None if run.average is None else run.average.module
        about: dict[str, Any] = {"step": run.step, "optimizer": self.optimizer, "recipe": self.recipe, "keep": keep}
        about["tokenizer"] = tokenizer_of(run.task)
        with parallel.agreed():
            about["metrics"] = self.metrics.content() if parallel.is_first() else None
        if sharding.is_divided(run.model):
            # any process may write buffers, which differ after BatchNorm: those of rank 0 count, as in an evaluation
            parallel.share_buffers(run.model)
            if average is not None:
                parallel.share_buffers(average)
            state["optimizer"], tensors = split_state(run.model, run.optimizer)
            return save_divided(folder, {**weight_parts(run.model, average), **tensors}, state, **about)
        path = folder
        with parallel.agreed():
            if parallel.is_first():
                path = checkpoint.save(folder, run.model, state, average=average, **about)
        return path


def capture_state(run: Run) -> dict[str, object]:
    """Return everything except the weights that a resumed run needs. Every process must call it.

    Args:
        run: The training.

    Returns:
        Tensors and plain values; on the first process with those of the optimizer, unless the network is divided.
    """
    device, optimizer = run.task.device, None
    if not sharding.is_divided(run.model):
        if isinstance(run.optimizer, CurvatureOptimizer):
            run.optimizer.consolidate_state_dict(to=0)
        optimizer = run.optimizer.state_dict() if parallel.is_first() else None
    own = {
        "data": run.streams.train.state_dict(),
        "rng": torch.get_rng_state(),
        "device_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }
    return {
        "optimizer": optimizer,
        "precision": run.stepper.precision.state_dict(),
        "averaged_steps": 0 if run.average is None else int(run.average.n_averaged),
        "step": run.step,
        "seconds": run.seconds,
        "ranks": parallel.gathered(own),
    }


def restore(run: Run, saved: checkpoint.Checkpoint, metrics: Path, say: Callable[[str], None]) -> None:
    """Load a checkpoint into a run, so that the training continues from its step.

    The training is then bit for bit that of an uninterrupted run if the machine, the number of processes and
    `torch.get_num_threads()` are the same, because floating-point sums depend on how they are divided. With another
    number of processes, the run has the same batches.

    Args:
        run: A new run of the same recipe.
        saved: The checkpoint.
        metrics: The run's `metrics.jsonl`.
        say: Prints a line; it is called if the metrics file is damaged, and if the number of processes has changed.

    Raises:
        UserError: If the checkpoint belongs to another network, tokenizer or other data.
    """
    check_tokenizer(saved, run.task)
    with parallel.agreed():
        record = record_of(saved, metrics, say)
        saved.load_weights(run.model)
        state = saved.load_state()
    load_optimizer(run.model, run.optimizer, saved, state["optimizer"])
    if saved.is_divided or sharding.is_divided(run.model):
        saved.load_weights(run.model)  # once more, as `load_optimizer` requires
    run.stepper.precision.load_state_dict(state["precision"])
    if run.average is not None:
        saved.load_weights(run.average.module, averaged=True)
        run.average.n_averaged.fill_(state["averaged_steps"])
    run.step, run.seconds, run.record = state["step"], state["seconds"], record
    shard, ranks = parallel.shard(), state["ranks"]
    same = len(ranks) == shard.world_size
    own = ranks[shard.rank if same else 0]
    run.streams.train.load_state_dict(own["data"])
    if not same:
        say(
            f"the checkpoint was saved by {len(ranks)} processes, and this run has {shard.world_size}: it continues "
            "with the same batches, but with other random numbers in layers such as dropout"
        )
        return
    torch.set_rng_state(own["rng"])
    if own["device_rng"] is not None and run.task.device.type == "cuda":
        torch.cuda.set_rng_state(own["device_rng"], run.task.device)


def record_of(saved: checkpoint.Checkpoint, metrics: Path, say: Callable[[str], None]) -> History:
    """Return the measurements of a run up to a checkpoint.

    They are read from the copy in the checkpoint, because the run's `metrics.jsonl` has no checksum. A resumed run
    writes that file anew.

    Args:
        saved: The checkpoint.
        metrics: The run's `metrics.jsonl`.
        say: Prints a line; it is called if that file is damaged.

    Returns:
        The record up to the step of the checkpoint.
    """
    own = saved.metrics
    if damage := _damage(metrics, own):
        say(f"{metrics} {damage}: it is restored from the copy in {saved.path}")
    return parse_metrics(own, saved.path / METRICS)


def _damage(metrics: Path, own: bytes) -> str | None:
    try:
        found = metrics.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found.startswith(own):
        return None
    lines = zip(found.splitlines(keepends=True), own.splitlines(keepends=True), strict=False)
    same = next((number for number, (left, right) in enumerate(lines) if left != right), None)
    return "is truncated" if same is None else f"is damaged in line {same + 1}"
