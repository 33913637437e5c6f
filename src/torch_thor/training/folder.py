"""The folder of a run: its files, and the conditions under which a training may write to it.

    recipe.yaml       the recipe of the run             curves.png     loss and primary metric of
    all optimizers .lock             the process that writes to it     summary.json   the results as
    JSON

and for each optimizer, in a folder with its name

    metrics.jsonl     every step, refresh and evaluation
    checkpoints/      the newest checkpoints, and in best/ that of the best evaluation
    tensorboard/      the event files of TensorBoard
    profile/          traces of a few steps, written with --profile
"""

import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, Timeout

from torch_thor.files import REMAINS, check_place, locked, write_text, writing
from torch_thor.training.checkpoint import PREFIX, newest
from torch_thor.training.errors import DamagedCheckpointError, UserError, require
from torch_thor.training.optimizers import OPTIMIZERS, settings_of
from torch_thor.training.recipe import FREE_ON_RESUME, Recipe
from torch_thor.training.recipes import differences, load_recipe, to_yaml

_LOCK, _OWNER, _JOB = ".lock", ".owner", ".job"


class RunFolder:
    """The folder of a run, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe, self.curves, self.summary = (
            path / "recipe.yaml",
            path / "curves.png",
            path / "summary.json",
        )
        self._lock: BaseFileLock | None = None  # while it is held

    @classmethod
    def named(cls, path: Path, *, resume: bool = False, overwrite: bool = False) -> "RunFolder":
        """Return the folder when the user names none: PATH, or PATH-2, PATH-3 if runs exist."""
        every = itertools.chain(
            [path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
        )
        taken = [cls(one) for one in itertools.takewhile(lambda one: cls(one)._is_used(), every)]
        if taken and (resume or overwrite or taken[-1]._is_restarted()):
            return taken[-1]
        return cls(path if not taken else path.with_name(f"{path.name}-{len(taken) + 1}"))

    def metrics(self, name: str) -> Path:
        """The metrics file of an optimizer."""
        return self.path / name / "metrics.jsonl"

    def checkpoints(self, name: str) -> Path:
        """The folder of an optimizer's checkpoints."""
        return self.path / name / "checkpoints"

    def tensorboard(self, name: str) -> Path:
        """The folder of an optimizer's TensorBoard files."""
        return self.path / name / "tensorboard"

    def profile(self, name: str) -> Path:
        """The folder of the traces that `--profile` writes for an optimizer."""
        return self.path / name / "profile"

    def is_run(self) -> bool:
        """Whether the folder contains a run, damaged or not."""
        return self.recipe.is_file() or any(self.path.glob(f"*/checkpoints/{PREFIX}*"))

    def stored(self) -> Recipe | None:
        """The recipe of the run in this folder; None if there is no run yet."""
        if not self.is_run():
            require(
                not self._is_used(),
                f"{self.path} is not a run folder and not empty: choose another with --out",
            )
            return None
        try:
            return load_recipe(str(self.recipe))
        except (UserError, UnicodeDecodeError) as error:
            raise UserError(
                f"{self.recipe} is damaged ({error}): copy that of a checkpoint over it, or choose "
                "another folder with --out"
            ) from error

    def _begun(self) -> Recipe | None:
        """Return the recipe of the newest checkpoint of verified checksum, or else the run's."""
        for name in OPTIMIZERS:
            with suppress(DamagedCheckpointError):
                if saved := newest(self.checkpoints(name), lambda _: None):
                    return saved.recipe
        return self.stored()

    def _is_used(self) -> bool:
        if not self.path.is_dir():
            return self.path.exists()
        own = (_LOCK, _OWNER, _JOB)
        return any(
            one.name not in own and not one.name.startswith(REMAINS) for one in self.path.iterdir()
        )

    def admit(
        self,
        recipe: Recipe,
        resume: bool,
        overwrite: bool,
        say: Callable[[str], None] = lambda _: None,
    ) -> bool:
        """Return whether the run in the folder continues, and change nothing.

        It refuses a run that may not write here.
        """
        begun = self._begun()
        check_place(self.path)
        require(
            not (resume and overwrite), "--resume and --overwrite exclude each other: choose one"
        )
        if begun is None:
            require(
                not resume,
                f"there is no run in {self.path} to resume: leave --resume out to start one",
            )
            return False
        require(
            begun.name == recipe.name,
            f"{self.path} belongs to recipe {begun.name}, not {recipe.name}: choose another folder "
            "with --out",
        )
        if self._is_restarted():
            resume, overwrite = True, False
            say(f"torchrun has started the processes again: the run in {self.path} continues")
        require(
            resume or overwrite,
            f"{self.path} contains a run already: continue it with --resume, choose another folder "
            "with --out, or delete it with --overwrite",
        )
        if resume:
            _check_epochs(begun, recipe)
            changed = differences(begun, recipe, FREE_ON_RESUME)
            require(
                not changed,
                f"the run in {self.path} has other settings ({'; '.join(changed)}): resume without "
                f"changing them (if {self.recipe.name} was, copy that of a checkpoint over it), or "
                "choose another folder with --out",
            )
        return resume

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Release at the end what `take` has taken."""
        try:
            if self.is_run():  # a folder that is used for something else must not get a file
                self.take()
            yield
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def take(self) -> None:
        """Let no other process write to the folder, which exists, until the end of `locked`."""
        if self._lock is not None:
            return
        # the lock's own file may be what tells a dead process
        lock, owner = self.path / _LOCK, self.path / _OWNER
        with writing(lock, "choose another folder with --out"):
            try:
                self._lock = locked(lock)
            except Timeout as error:  # a subclass of OSError
                by = owner.read_text(encoding="utf-8", errors="replace") if owner.exists() else ""
                raise UserError(
                    f"the run in {self.path} is in use by {by.strip() or 'another process'}: wait "
                    "for it, end it, or choose another folder with --out"
                ) from error
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

    def claim(self, recipe: Recipe, resume: bool, overwrite: bool) -> None:
        """Create or take over the folder, inside `locked`; delete its run unless it continues."""
        with writing(self.path, "choose another folder with --out"):
            self.path.mkdir(parents=True, exist_ok=True)
            self.take()
            self.admit(recipe, resume, overwrite)  # another process may have begun a run since
            if not resume:
                for name in OPTIMIZERS:
                    shutil.rmtree(self.path / name, ignore_errors=True)
                # the recipe last: it marks the folder as a run
                for file in (self.curves, self.summary, self.recipe):
                    file.unlink(missing_ok=True)
            # before the recipe: a run in the folder is that of this job
            write_text(self.path / _JOB, _job())
            write_text(self.recipe, to_yaml(recipe))

    def _is_restarted(self) -> bool:
        job = self.path / _JOB
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        return (
            again and self.is_run() and job.is_file() and job.read_text(encoding="utf-8") == _job()
        )


def _job() -> str:
    """The name of the `torchrun` that has started this process; the same after a restart."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # of jobs without a name
    return name if name != "none" else f"{socket.gethostname()}, process {os.getppid()}"


def _check_epochs(begun: Recipe, recipe: Recipe) -> None:
    """Refuse a number of epochs with which the steps so far would have been different."""
    if recipe.epochs == begun.epochs:
        return
    said, other = f"epochs={recipe.epochs}", "start another run with --out"
    require(
        recipe.steps is None,
        f"{said}: the length is set by steps={recipe.steps}; leave epochs out, or {other}",
    )
    require(
        recipe.epochs > begun.epochs,
        f"{said} is less than the run's {begun.epochs}: --resume only lengthens a run; leave "
        f"epochs out, or {other}",
    )
    damped = any("damping" in settings_of(name) for name in recipe.optimizer)
    for key in ("schedule", *(["damping_schedule"] if damped else [])):
        schedule = getattr(recipe, key)
        require(
            not schedule.ends_with_training,
            f"{said}: {key}.kind={schedule.kind} ends with the training, so the steps so far used "
            f"the schedule of {begun.epochs} epochs; {other}, and set {key}.horizon_epochs if you "
            "may lengthen it later, or weights=CHECKPOINT to start from the weights of this run",
        )
