"""Saving checkpoints of a run: at intervals, at the end, of the best evaluation, and when a signal stops it."""

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from torch_thor.files import REMAINS, whole_folder
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.training.checkpoint import (
    AVERAGED,
    BEST,
    CHECKSUM,
    MANIFEST,
    PREFIX,
    RECIPE,
    STATE,
    WEIGHTS,
    digest,
    first_names,
    newest_first,
    sha256,
)
from torch_thor.training.errors import StoppedError, UserError, first_line
from torch_thor.training.loop import Point, Run, Score
from torch_thor.training.parallel import agreed


@contextmanager
def listening() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM while the block runs; a second one has its usual effect.

    Yields:
        A list that gets the number of the signal. Outside of the main thread Python lets nobody handle any.
    """
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if current_thread() is main_thread() else ()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Saver:
    """The observer that saves checkpoints and stops after a signal. Every process has one.

    Args:
        folder: The folder of the run's checkpoints.
        recipe: The recipe of the run, in YAML.
        offset: Flushes `metrics.jsonl` to the disk and returns its length; called on the first process only.
    """

    def __init__(self, folder: Path, recipe: str, offset: Callable[[], int]) -> None:
        self.folder, self.recipe, self.offset = folder, recipe, offset

    def step(self, run: Run, point: Point) -> None:
        """Do nothing."""

    def evaluation(self, run: Run, score: Score) -> None:
        """Do nothing."""

    def end_of_step(self, run: Run) -> None:
        """Save if it is time, and stop after a signal.

        Raises:
            StoppedError: If any process has received a signal. The checkpoint has then been written.
        """
        stops = run.stopping and not run.done
        due = run.step % (run.recipe.checkpoint_interval or run.task.steps_per_epoch) == 0 or run.done or stops
        best = run.recipe.keep_best and run.best is not None and run.best.step == run.step
        if due or best:
            with agreed(run.ranks):
                offset = self.offset() if run.ranks.first else 0
            # a best one is not among the newest, which frequent evaluations would all replace
            keep = run.recipe.keep_checkpoints if due else 0
            save(self.folder, run, recipe=self.recipe, offset=offset, keep=keep, best=best)
        if stops:
            raise StoppedError(run.step)

    def close(self) -> None:
        """Do nothing."""


def save(folder: Path, run: Run, *, recipe: str, offset: int, keep: int, best: bool = False) -> Path:
    """Write a checkpoint, then remove older ones. Every process must call it; the first one writes.

    Args:
        folder: The folder of the run's checkpoints.
        run: The run.
        recipe: Its recipe, in YAML.
        offset: The length of its `metrics.jsonl`, in bytes.
        keep: Number of newest checkpoints to keep, this one included. Those of later steps do not count: a run
            continues from an earlier step only if they are damaged. 0 if this is to be the best one only.
        best: Whether it is that of the best evaluation, which replaces the previous one in `best`.

    Returns:
        The folder of the new checkpoint.

    Raises:
        UserError: If it cannot be written. No incomplete checkpoint is left, and older ones are kept.
    """
    weights, state = whole(run)
    final = folder / BEST / f"{PREFIX}{run.step:08d}" if best else folder / f"{PREFIX}{run.step:08d}"
    with agreed(run.ranks), _reporting(final, folder):
        if run.ranks.first:
            final.parent.mkdir(parents=True, exist_ok=True)
            _clear(final.parent)
            with whole_folder(final) as temporary:  # replaces a damaged checkpoint of the same step
                _write(temporary, run, weights, state, recipe, offset)
            if best:
                _remove(path for path in final.parent.iterdir() if path != final)
            if best and keep:
                _clear(folder)
                with whole_folder(folder / final.name) as temporary:
                    for file in final.iterdir():
                        _link(file, temporary / file.name)
            if keep:
                _remove([path for path in newest_first(folder) if path.name < final.name][keep - 1 :])
    return final


def whole(run: Run) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return the weights by file, and everything else, whole on the first process. Every process must call it."""
    from torch.distributed.checkpoint.state_dict import (  # takes a second
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if isinstance(run.optimizer, CurvatureOptimizer):
        run.optimizer.consolidate_state_dict(to=None)  # of divide_curvature
    weights = {}
    for file, model in [(WEIGHTS, run.model), *([] if run.average is None else [(AVERAGED, run.average.module)])]:
        first = first_names(model)
        found: dict[str, Any] = get_model_state_dict(model, options=options)
        weights[file] = {name: value.contiguous() for name, value in found.items() if first.get(name, name) == name}
    cuda = torch.cuda.get_rng_state(run.ranks.device) if run.ranks.device.type == "cuda" else None
    state = {
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=options),
        "precision": run.precision.state_dict(),
        "averaged_steps": 0 if run.average is None else int(run.average.n_averaged),
        "seconds": run.seconds,
        "score": None if run.score is None else asdict(run.score),
        "best": None if run.best is None else asdict(run.best),
        "samples": run.task.samples,
        "random": run.ranks.gathered({"cpu": torch.get_rng_state(), "cuda": cuda}),
    }
    return weights, state


def _write(
    folder: Path, run: Run, weights: dict[str, dict[str, Tensor]], state: dict[str, Any], recipe: str, offset: int
) -> None:
    with (folder / STATE).open("wb") as stream:  # given a path, torch would not give the reason of a failure
        torch.save(state, stream)
    for name, tensors in weights.items():
        save_file(tensors, folder / name)
        # safetensors makes files readable for their owner only
        (folder / name).chmod(stat.S_IMODE((folder / STATE).stat().st_mode))
    (folder / RECIPE).write_text(recipe, encoding="utf-8")
    about = {
        "step": run.step,
        "optimizer": run.name,
        "tokenizer": getattr(run.task, "tokenizer_checksum", None),
        "offset": offset,
        "sha256": {path.name: sha256(path) for path in sorted(folder.iterdir())},
    }
    text = json.dumps({**about, CHECKSUM: digest(about)}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


@contextmanager
def _reporting(final: Path, folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own for a full disk
        cause: BaseException | None = error  # torch's own message is a position in the archive
        while cause is not None and not getattr(cause, "strerror", None):
            cause = cause.__context__
        kept = newest_first(folder)
        left = f"the newest complete one is {kept[0].name}" if kept else "there is no earlier one"
        raise UserError(
            f"checkpoint {final} cannot be written ({getattr(cause, 'strerror', None) or first_line(error)}); {left}: "
            "free some disk space, then continue with --resume"
        ) from error


def _link(file: Path, name: Path) -> None:
    try:
        os.link(file, name)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, name)


def _clear(folder: Path) -> None:
    _remove(folder.glob(f"{REMAINS}*"))  # of a process that was killed


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        shutil.rmtree(path, ignore_errors=True)  # an error must not end the training; the next checkpoint retries
