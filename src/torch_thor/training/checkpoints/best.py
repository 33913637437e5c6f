"""The best checkpoint of a run: the one after the best evaluation, the first of equals.

It is kept beside the newest ones as `best/step-00000123`. The one before is removed once it is complete.
"""

import contextlib
import os
import shutil
from pathlib import Path

from torch_thor.files import whole_folder
from torch_thor.training.checkpoints import checkpoint
from torch_thor.training.engine.history import History
from torch_thor.training.output_files import writing


def is_best(record: History, step: int) -> bool:
    """Tell whether a step has the best weights so far.

    Args:
        record: The run up to that step.
        step: Optimizer steps done.

    Returns:
        True if they were evaluated, with a better primary metric than all before.
    """
    return record.best is not None and record.best.step == step


def keep(path: Path) -> None:
    """Make a checkpoint the best one.

    Its files are linked where the file system can do that, so that they take no room a second time, else copied.

    Args:
        path: One of the newest, whole.
    """
    folder = path.parent / checkpoint.BEST
    final = folder / path.name
    with writing(final):
        folder.mkdir(exist_ok=True)
        with whole_folder(final) as temporary:
            for file in path.iterdir():
                _link(file, temporary / file.name)
    remove_others(final)


def remove_others(path: Path) -> None:
    """Remove what was best before, and what a kill has left half-written.

    Args:
        path: The best checkpoint.
    """
    for other in path.parent.iterdir():
        if other != path:
            shutil.rmtree(other, ignore_errors=True)


def catch_up(folder: Path, record: History) -> None:
    """Make the best checkpoint what the record says, where a run was killed before it could.

    Args:
        folder: The folder of the newest checkpoints.
        record: What the run knows when it begins or goes on.
    """
    if record.best is not None:
        path = folder / f"{checkpoint.PREFIX}{record.best.step:08d}"
        if path.exists() and not (folder / checkpoint.BEST / path.name).exists():
            keep(path)


def _link(file: Path, name: Path) -> None:
    with contextlib.suppress(OSError):  # a file system without hard links
        os.link(file, name)
        return
    shutil.copyfile(file, name)
