"""The folder of a run: its files, and the conditions under which a training may write to it.

    recipe.yaml       the recipe of the run
    curves.png        loss and primary metric of all optimizers
    summary.json      the results as JSON
    .lock, .owner     the process that writes to it
    .job              the `torchrun` that has begun it, which may start its processes again
    .origin           what it was begun from, to notice an edit of the recipe's file

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
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, Timeout

from torch_thor.errors import UserError, explaining, require
from torch_thor.files import REMAINS, check_place, locked, write_text, writing
from torch_thor.training.checkpoint import PREFIX, newest
from torch_thor.training.errors import DamagedCheckpointError
from torch_thor.training.models.bert import CONFIGURATION
from torch_thor.training.optimizers import OPTIMIZERS, settings_of
from torch_thor.training.origin import ORIGIN, Origin, store_origin, stored_origin
from torch_thor.training.recipe_model import FREE_ON_RESUME, Recipe
from torch_thor.training.recipes import changes, differences, edited, load_recipe, to_yaml

_LOCK, _OWNER, _JOB = ".lock", ".owner", ".job"


class InUseError(UserError):
    """Another process writes to the run folder."""


class RunFolder:
    """The folder of a run, which need not exist.

    Args:
        path: The folder.
        origin: What the user names as the recipe of the run; None if a program has made it.
    """

    def __init__(self, path: Path, origin: Origin | None = None) -> None:
        self.origin = origin
        # These are the next names that a new run may take if the user has named no folder.
        self._others: Iterator[Path] | None = None
        self._set(path)

    def _set(self, path: Path) -> None:
        self.path = path
        self.recipe, self.curves, self.summary = (
            path / "recipe.yaml",
            path / "curves.png",
            path / "summary.json",
        )
        self._lock: BaseFileLock | None = None  # while it is held

    @classmethod
    def named(
        cls,
        path: Path,
        origin: Origin | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> "RunFolder":
        """Return the folder when the user names none: PATH, or PATH-2, PATH-3 if runs exist.

        To continue or overwrite, it is that of the latest run of the same origin.

        Raises:
            UserError: If no run of this origin can be continued.
        """
        names = itertools.chain(
            [path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
        )
        taken: list[RunFolder] = []
        while (folder := cls(next(names), origin))._is_used():
            taken.append(folder)
        candidates = [run for run in taken if run._is_restarted()]
        if resume or overwrite:
            candidates += [run for run in taken if run._is_of(origin)]
        if candidates:
            return candidates[-1]
        require(
            not (resume and taken),
            f"no run in {', '.join(str(run.path) for run in taken)} was begun with "
            f"{origin and origin.name}: leave --resume out to start one, or name the folder of "
            "the run with --out",
        )
        folder._others = None if resume else names
        return folder

    def metrics(self, name: str) -> Path:
        """The metrics file of an optimizer."""
        return self.path / name / "metrics.jsonl"

    def checkpoints(self, name: str) -> Path:
        """The folder of an optimizer's checkpoints."""
        return self.path / name / "checkpoints"

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
        with explaining(
            (UserError, UnicodeDecodeError),
            lambda error: (
                f"{self.recipe} is damaged ({error}): copy that of a checkpoint over it, or choose "
                "another folder with --out"
            ),
        ):
            return load_recipe(str(self.recipe))

    def continued(self, stored: Recipe, words: Sequence[str]) -> Recipe:
        """Return the recipe of the run in this folder with words, and what its file says anew.

        Raises:
            UserError: If the run was begun with another file, which has other keys.
        """
        begun, now = stored_origin(self.path), self.origin
        if now is None:
            return edited(stored, {}, {}, words)
        if begun is not None and not begun.is_same(now):
            changed = changes(begun.keys, now.keys)
            require(
                not changed,
                f"the run in {self.path} was begun with {begun.name}, and {now.name} is another "
                f"recipe ({'; '.join(changed.values())}): name that one or none to continue the "
                "run, or choose another folder with --out",
            )
        return edited(stored, None if begun is None else begun.keys, now.keys, words)

    def _is_of(self, origin: Origin | None) -> bool:
        """Whether the run may have been begun with a recipe; None stands for any."""
        begun = stored_origin(self.path)
        return origin is None or begun is None or begun.is_same(origin)

    def begun(self) -> Recipe | None:
        """Return the recipe of the newest checkpoint of verified checksum, or else the run's."""
        for name in OPTIMIZERS:
            with suppress(DamagedCheckpointError):
                if saved := newest(self.checkpoints(name), lambda _: None):
                    return saved.recipe
        return self.stored()

    def _is_used(self) -> bool:
        if not self.path.is_dir():
            return self.path.exists()
        ignored = (_LOCK, _OWNER, _JOB, ORIGIN)
        return any(
            entry.name not in ignored and not entry.name.startswith(REMAINS)
            for entry in self.path.iterdir()
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
        # If a run has begun here meanwhile, `claim` gives a new run another name.
        begun = self.begun() if self._others is None else None
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
            # a configuration file may have been moved: the checkpoint has its checksum
            files = all(settings.model.endswith(CONFIGURATION) for settings in (begun, recipe))
            changed = differences(begun, recipe, (*FREE_ON_RESUME, *["model"] * files))
            free = [line for line in differences(begun, recipe) if line not in changed]
            require(
                not changed,
                f"the run in {self.path} has other settings ({'; '.join(changed)}): resume without "
                f"changing them (if {self.recipe.name} was, copy that of a checkpoint over it), or "
                "choose another folder with --out",
            )
            if free:
                say(f"the run in {self.path} continues with {'; '.join(free)}")
        return resume

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Release at the end what `take` has taken."""
        try:
            # a folder that is used for something else must not get a file
            if self.is_run() and self._others is None:
                self.take()
            yield
        finally:
            self._release()

    def _release(self) -> None:
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
                raise InUseError(
                    f"the run in {self.path} is in use by {by.strip() or 'another process'}: wait "
                    "for it, end it, or choose another folder with --out"
                ) from error
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

    def claim(self, recipe: Recipe, resume: bool, overwrite: bool) -> None:
        """Create or take over the folder, inside `locked`; delete its run unless it continues."""
        with writing(self.path, "choose another folder with --out"):
            self.path.mkdir(parents=True, exist_ok=True)
            while self._others is not None and not self._is_free():
                self._release()
                self._set(next(self._others))
                self.path.mkdir(exist_ok=True)
            self.take()
            self.admit(recipe, resume, overwrite)  # another process may have begun a run since
            if not resume:
                for name in OPTIMIZERS:
                    shutil.rmtree(self.path / name, ignore_errors=True)
                # The recipe is removed last, because it marks the folder as a run.
                for file in (self.curves, self.summary, self.recipe):
                    file.unlink(missing_ok=True)
            # It is written before the recipe, so that a run in the folder is that of this job.
            write_text(self.path / _JOB, _job())
            if self.origin is not None:
                store_origin(self.origin, self.path)
            elif not resume:
                (self.path / ORIGIN).unlink(missing_ok=True)
            write_text(self.recipe, to_yaml(recipe))

    def check_present(self) -> None:
        """Refuse to go on if the folder was deleted during the training."""
        require(
            self.recipe.is_file(),
            f"{self.path} was deleted or moved while the run wrote to it: it cannot be continued; "
            "start the training again, or move the folder back and use --resume",
        )

    @contextmanager
    def present(self) -> Iterator[None]:
        """Say so, once, if errors of the block come from the folder's deletion."""
        told = threading.excepthook

        def tell(error: threading.ExceptHookArgs) -> None:
            if self.recipe.is_file():  # else it is a thread that writes there, as TensorBoard has
                told(error)

        threading.excepthook = tell
        try:
            yield
        except (UserError, OSError):
            self.check_present()
            raise
        finally:
            threading.excepthook = told

    def _is_free(self) -> bool:
        """Take the folder, and return whether no other process has, or has begun a run in it."""
        try:
            self.take()
        except InUseError:
            return False
        return not self._is_used()

    def _is_restarted(self) -> bool:
        job = self.path / _JOB
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        return (
            again and self.is_run() and job.is_file() and job.read_text(encoding="utf-8") == _job()
        )


def _job() -> str:
    """The name of the `torchrun` that has started this process; the same after a restart."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # A job without a name is told by the process that has started it.
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
