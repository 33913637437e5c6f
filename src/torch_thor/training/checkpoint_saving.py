"""Saving a run's checkpoints: at intervals, the end, the best evaluation, and a stopping signal."""

import json
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from torch_thor.errors import UserError, first_line
from torch_thor.files import REMAINS, flush, if_offered, remedy_for, sha256, whole_folder
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
    by_first_name,
    digest,
    newest_first,
)
from torch_thor.training.errors import StoppedError
from torch_thor.training.loop import Observer, Run
from torch_thor.training.parallel import agreed
from torch_thor.training.recipes import to_yaml

# They ask a training to save and stop: Ctrl-C, a scheduler's end and its warnings before that, and
# a terminal that is closed. Not every system has them all.
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


@contextmanager
def listening() -> Iterator[list[int]]:
    """Note the signals in `SIGNALS` in a list while the block runs.

    A second one has its usual effect, and SIGHUP has none where it is ignored, as under nohup.

    Yields:
        The list.
    """
    received: list[int] = []
    known = [number for name in SIGNALS if (number := getattr(signal, name, None)) is not None]
    # Outside of the main thread Python lets nobody handle a signal.
    numbers = known if current_thread() is main_thread() else []
    before: dict[int, Any] = {
        number: handler
        for number in numbers
        # a shell lets the jobs that it starts in the background ignore SIGINT, without being asked
        if (handler := signal.getsignal(number)) != signal.SIG_IGN or number.name != "SIGHUP"
    }

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Saver(Observer):
    """A saver of checkpoints, which stops after a signal.

    `offset` flushes `metrics.jsonl` and returns its length.
    """

    def __init__(self, folder: Path, offset: Callable[[], int]) -> None:
        self.folder, self.offset = folder, offset

    def end_of_step(self, run: Run) -> None:
        """Save if it is time, and stop after a signal, with a `StoppedError`."""
        stops = run.stopping and (run.unevaluated or not run.done)
        due = (
            run.step % (run.recipe.checkpoint_interval or run.task.steps_per_epoch) == 0
            or run.done
            or stops
        )
        if due or (run.recipe.keep_best and run.best is not None and run.best.step == run.step):
            with agreed(run.ranks):
                offset = self.offset() if run.ranks.first else 0
            save(self.folder, run, offset)
        if stops:
            raise StoppedError(run.step)


def save(folder: Path, run: Run, offset: int) -> None:
    """Write a checkpoint, then `settle` all; every process calls it, and the first one writes."""
    weights, state = consolidated(run)
    final = folder / f"{PREFIX}{run.step:08d}"
    with agreed(run.ranks):
        if not run.ranks.first:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with whole_folder(final) as temporary:  # replaces a damaged checkpoint of the same step
                _write(temporary, run, weights, state, offset)
            settle(folder, run)
        except (OSError, RuntimeError, SafetensorError) as error:
            # of a full disk safetensors tells in an error of its own, and torch gives a position in
            # the archive
            cause: BaseException | None = error
            while cause is not None and not getattr(cause, "strerror", None):
                cause = cause.__context__
            kept = newest_first(folder)
            left = (
                f"the newest complete one is {kept[0].name}" if kept else "there is no earlier one"
            )
            raise UserError(
                f"checkpoint {final} cannot be written "
                f"({getattr(cause, 'strerror', None) or first_line(error)}); {left}: "
                f"{remedy_for(cause or error)}"
            ) from error


def settle(folder: Path, run: Run) -> None:
    """Link the best checkpoint, and remove all but it and the newest ones.

    What killed processes have left is removed too.
    """
    best = f"{PREFIX}{run.best.step:08d}" if run.best is not None and run.recipe.keep_best else ""
    if best and (folder / best).exists():
        temporary, link = folder / f"{REMAINS}{BEST}", folder / BEST
        temporary.unlink(missing_ok=True)
        with if_offered(f"make the link {BEST!r} to the best checkpoint"):
            temporary.symlink_to(best)
            if link.is_dir() and not link.is_symlink():  # a copy of the run that followed the link
                shutil.rmtree(link)
            temporary.replace(link)
        flush(folder)
    # a run continues from an earlier step only if those of later steps are damaged
    earlier = [path for path in newest_first(folder) if path.name <= f"{PREFIX}{run.step:08d}"]
    old = [
        path
        for path in earlier[run.recipe.keep_checkpoints :]
        if path.name not in (best, (folder / BEST).resolve().name)
    ]
    for path in (*folder.glob(f"{REMAINS}{PREFIX}*"), *old):
        # It is renamed first, so that no half of it looks like a checkpoint. An error must not end
        # the training, and the next checkpoint tries again.
        with suppress(OSError):
            path = (
                path
                if path.name.startswith(REMAINS)
                else path.rename(folder / f"{REMAINS}{path.name}")
            )
            shutil.rmtree(path)


def consolidated(run: Run) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return the weights by file, and everything else, consolidated on the first process.

    Every process must call it.
    """
    from torch.distributed.checkpoint.state_dict import (  # takes a second
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if isinstance(run.optimizer, CurvatureOptimizer):
        run.optimizer.consolidate_state_dict(to=None)  # of divide_curvature
    weights = {}
    for file, model in [
        (WEIGHTS, run.model),
        *([] if run.average is None else [(AVERAGED, run.average.module)]),
    ]:
        tensors: dict[str, Any] = get_model_state_dict(model, options=options)
        weights[file] = {
            name: value.contiguous() for name, value in by_first_name(model, tensors).items()
        }
    cuda = torch.cuda.get_rng_state(run.ranks.device) if run.ranks.device.type == "cuda" else None
    state = {
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=options),
        "precision": run.precision.scaler.state_dict(),
        "averaged_steps": 0 if run.average is None else int(run.average.n_averaged),
        "seconds": run.seconds,
        "score": run.score and asdict(run.score),
        "best": run.best and asdict(run.best),
        "samples": run.task.samples,
        "random": run.ranks.gathered({"cpu": torch.get_rng_state(), "cuda": cuda}),
    }
    return weights, state


def _write(
    folder: Path,
    run: Run,
    weights: dict[str, dict[str, Tensor]],
    state: dict[str, Any],
    offset: int,
) -> None:
    # given a path, torch would not give the reason of a failure
    with (folder / STATE).open("wb") as stream:
        torch.save(state, stream)
    for name, tensors in weights.items():
        save_file(tensors, folder / name)
        # safetensors makes files readable for their owner only
        with if_offered("change who may read a file"):
            (folder / name).chmod(stat.S_IMODE((folder / STATE).stat().st_mode))
    (folder / RECIPE).write_text(to_yaml(run.recipe), encoding="utf-8")
    about = {
        "step": run.step,
        "optimizer": run.name,
        "tokenizer": getattr(run.task, "tokenizer_checksum", None),
        "data": dict(getattr(run.task, "data_checksums", {})),
        "offset": offset,
        "sha256": {path.name: sha256(path) for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(
        json.dumps({**about, CHECKSUM: digest(about)}, indent=2) + "\n", encoding="utf-8"
    )
