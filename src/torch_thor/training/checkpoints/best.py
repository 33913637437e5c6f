"""The best checkpoint of a run: that of the evaluation with the best primary metric, or of the first such evaluation.

It is stored as `best/step-00000123` in the folder of the newest checkpoints. The previous best checkpoint is removed
when the new one is complete.
"""

import contextlib
import os
import shutil
from pathlib import Path

from torch_thor.files import whole_folder
from torch_thor.training.checkpoints.checkpoint import BEST
from torch_thor.training.checkpoints.manifest import PREFIX
from torch_thor.training.engine.history import History
from torch_thor.training.output_files import writing


def is_best(record: History, step: int) -> bool:
    """Return whether the weights after a step are the best so far.

    Args:
        record: The run up to that step.
        step: Optimizer steps done.

    Returns:
        True if the weights were evaluated after this step, and the primary metric was better than ever before.
    """
    return record.best is not None and record.best.step == step


def keep(path: Path) -> None:
    """Make one of the newest checkpoints the best one.

    Its files become hard links if the file system supports these, so that they need no more disk space; otherwise they
    are copied.

    Args:
        path: The checkpoint, which must be complete.
    """
    folder = path.parent / BEST
    final = folder / path.name
    with writing(final):
        folder.mkdir(exist_ok=True)
        with whole_folder(final) as temporary:
            for file in path.iterdir():
                _link(file, temporary / file.name)
    remove_others(final)


def remove_others(path: Path) -> None:
    """Remove previous best checkpoints, and incomplete ones that a killed process has left.

    Args:
        path: The best checkpoint.
    """
    for other in path.parent.iterdir():
        if other != path:
            shutil.rmtree(other, ignore_errors=True)


def keep_missing_best(folder: Path, record: History) -> None:
    """Keep the best checkpoint if the run was killed after writing it and before marking it as the best.

    Args:
        folder: The folder of the newest checkpoints.
        record: The record of the run when it begins or is resumed.
    """
    if record.best is not None:
        path = folder / f"{PREFIX}{record.best.step:08d}"
        if path.exists() and not (folder / BEST / path.name).exists():
            keep(path)


def _link(file: Path, name: Path) -> None:
    with contextlib.suppress(OSError):  # a file system without hard links
        os.link(file, name)
        return
    shutil.copyfile(file, name)
