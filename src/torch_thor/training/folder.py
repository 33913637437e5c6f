"""The folder of a run: its files, and who may write to it.

    recipe.yaml       the recipe of the run
    curves.png        loss and primary metric of all optimizers
    summary.json      the results as JSON
    .lock             held by the process that writes

and for each optimizer, in a folder with its name

    metrics.jsonl     every step, refresh and evaluation
    checkpoints/      the newest checkpoints, and the link best to the best evaluation's
    tensorboard/      the event files of TensorBoard
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from torch_thor.errors import UserError, require
from torch_thor.files import write_text
from torch_thor.training.checkpoint import CHECKPOINTS, RECIPE, newest
from torch_thor.training.optimizers import OPTIMIZERS
from torch_thor.training.recipe_model import FREE_ON_RESUME, Recipe
from torch_thor.training.recipes import differences, load_recipe, override, to_yaml


class RunFolder:
    """The folder of a run, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path, self.recipe = path, path / RECIPE
        self.curves, self.summary = path / "curves.png", path / "summary.json"

    def metrics(self, name: str) -> Path:
        """The metrics file of an optimizer."""
        return self.path / name / "metrics.jsonl"

    def checkpoints(self, name: str) -> Path:
        """The folder of an optimizer's checkpoints."""
        return self.path / name / CHECKPOINTS

    @property
    def is_run(self) -> bool:
        """Whether the folder contains a run."""
        return self.recipe.is_file()

    @property
    def is_restarted(self) -> bool:
        """Whether `torchrun` has started the processes of a run anew, after one had failed."""
        return self.is_run and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    def continued(self, words: Sequence[str]) -> Recipe:
        """Return the recipe of the run with words on top, which a run that continues may change."""
        require(
            self.is_run,
            f"there is no run in {self.path} to resume: leave --resume out to start a run",
        )
        stored = load_recipe(str(self.recipe))
        recipe = override(stored, words)
        saved = (newest(self.checkpoints(name), lambda _: None) for name in stored.optimizer)
        begun = next((each.recipe for each in saved if each is not None), stored)
        # otherwise the steps so far would have been different
        lengthens = recipe.epochs > begun.epochs and not (
            begun.schedule.ends_with_training or begun.damping_schedule.ends_with_training
        )
        changed = differences(
            begun, recipe, [key for key in FREE_ON_RESUME if key != "epochs" or lengthens]
        )
        require(
            not changed,
            f"the run in {self.path} has other settings ({'; '.join(changed)}): resume without "
            "changing them (epochs may grow if no schedule ends with the training, as with "
            "schedule.horizon_epochs), or choose another folder with --out",
        )
        return recipe

    def check_free(self) -> None:
        """Refuse a new run where a run exists."""
        require(
            not self.is_run,
            f"{self.path} contains a run already: continue it with --resume, choose another folder "
            "with --out, or delete it with --overwrite",
        )

    @contextmanager
    def begin(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> Iterator[None]:
        """Hold the lock in the block; first write the recipe, of a new run into an empty folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self.path / ".lock").acquire(blocking=False)
        except Timeout as error:
            raise UserError(
                f"the run in {self.path} is in use by another process: wait for it, end it, or "
                "choose another folder with --out"
            ) from error
        with lock:
            if not (resume or overwrite):
                self.check_free()  # a run may have begun since
            if not resume:
                self.recipe.unlink(missing_ok=True)
                for name in OPTIMIZERS:
                    shutil.rmtree(self.path / name, ignore_errors=True)
                for file in (self.curves, self.summary):
                    file.unlink(missing_ok=True)
            write_text(self.recipe, to_yaml(recipe))
            yield
