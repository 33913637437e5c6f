"""The folder of a run: which run it belongs to, and the conditions under which a training may write to it."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch_thor.training.checkpoints import checkpoint
from torch_thor.training.checkpoints.run_paths import CURVES_FILE, RECIPE_FILE, SUMMARY_FILE, RunPaths
from torch_thor.training.config.lengthening import check_epochs
from torch_thor.training.config.recipe import FREE_ON_RESUME, Recipe
from torch_thor.training.config.recipe_values import differences
from torch_thor.training.config.stored_recipe import DamagedRecipeError, StoredRecipe, read_stored, stored_text
from torch_thor.training.config.yaml_text import read_text
from torch_thor.training.errors import DamagedCheckpointError, UserError, require
from torch_thor.training.lock import LOCK_FILE, Lock, is_foreign
from torch_thor.training.optimizers.registry import OPTIMIZERS
from torch_thor.training.output_files import check_place, write_whole, writing


@dataclass(frozen=True)
class RunFolder(RunPaths):
    """The folder of a run.

    Args:
        path: The folder.
        parsed: Not an argument. It caches the parsed recipe by the text of the file.
    """

    parsed: dict[str, StoredRecipe] = field(default_factory=dict, init=False, compare=False, repr=False)

    def lock(self) -> Lock:
        """Return the lock that a process must hold to write to the folder.

        Returns:
            The lock, not acquired yet.
        """
        what = f"the run in {self.path}"
        return Lock(self.path / LOCK_FILE, what, "wait for it, end it, or choose another folder with --out")

    def stored_recipe(self, say: Callable[[str], None] = lambda _: None) -> Recipe | None:
        """Return the recipe of the run in this folder.

        Args:
            say: Prints a line; it is called if the file is damaged and the copy in a checkpoint is used instead.

        Returns:
            The recipe, or `None` if the folder contains no run yet.

        Raises:
            UserError: If the folder is used for something else, or the recipe is damaged and there is no copy.
        """
        stored = self._stored(say)
        return None if stored is None else stored.recipe

    def _stored(self, say: Callable[[str], None]) -> StoredRecipe | None:
        file = self.path / RECIPE_FILE
        if not self.is_run():
            if self.path.exists() and (not self.path.is_dir() or any(map(is_foreign, self.path.iterdir()))):
                raise UserError(f"{self.path} is not a run folder and not empty: choose another folder with --out")
            return None
        try:
            require(file.is_file(), f"{file} is missing")
            text = read_text(file)
            stored = self.parsed[text] = self.parsed.get(text) or read_stored(text)
            copy = None if stored.has_checksum else self._copy()
            if copy is not None:
                changed = differences(copy[1].recipe, stored.recipe, but=FREE_ON_RESUME)
                require(not changed, f"it differs from the copy in {copy[0].path}: {'; '.join(changed)}")
                check_epochs(copy[1].recipe, stored.recipe)
        except UserError as error:
            copy = self._copy()
            if copy is None:
                what = "damaged" if isinstance(error, DamagedRecipeError) else "not a recipe that this version can read"
                raise UserError(f"{file} is {what} ({error}): choose another folder with --out") from error
            say(f"{file} cannot be used ({error}): the copy in {copy[0].path} is used instead")
            return copy[1]
        return stored

    def is_run(self) -> bool:
        """Return whether the folder contains a run, damaged or not.

        Returns:
            True if there is a recipe or a checkpoint.
        """
        if (self.path / RECIPE_FILE).is_file():
            return True
        return any(checkpoint.holds_checkpoints(self.checkpoints(name)) for name in OPTIMIZERS)

    def _copy(self) -> tuple[checkpoint.Checkpoint, StoredRecipe] | None:
        # the newest undamaged checkpoint, with its recipe
        found = []
        for name in OPTIMIZERS:
            with suppress(DamagedCheckpointError):
                saved = checkpoint.newest_whole(self.checkpoints(name), lambda _: None)
                found += [] if saved is None else [saved]
        for saved in sorted(found, key=lambda saved: saved.path.stat().st_mtime, reverse=True):
            with suppress(UserError):
                return saved, read_stored(saved.recipe_text)
        return None

    def claim(self, recipe: Recipe, lock: Lock, *, resume: bool, overwrite: bool) -> None:
        """Create or take over the folder for a run of this recipe, or refuse before anything is changed.

        Args:
            recipe: The recipe to run.
            lock: The lock from `lock`; it is acquired here unless it is already.
            resume: Whether to continue the run in the folder.
            overwrite: Whether to delete the run in the folder.

        Raises:
            UserError: If the run may not write to the folder.
        """
        with writing(self.path, "choose another folder with --out"):
            self.path.mkdir(parents=True, exist_ok=True)
        lock.take()
        self.check(recipe, resume=resume, overwrite=overwrite)  # another process may have begun a run since
        if overwrite and not resume:
            self._clear()
        file, text = self.path / RECIPE_FILE, stored_text(recipe)
        if not file.is_file() or file.read_bytes() != text.encode("utf-8"):
            write_whole(file, text)  # it is missing or damaged, or a resumed run has changed a key that it may change

    def check(
        self, recipe: Recipe, *, resume: bool, overwrite: bool, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Refuse a folder that this run may not write to. Nothing is changed.

        Args:
            recipe: The recipe to run.
            resume: Whether to continue the run in the folder.
            overwrite: Whether to delete the run in the folder.
            say: Prints a line, as in `stored_recipe`.

        Raises:
            UserError: If the run may not write to the folder.
        """
        stored = self._stored(say)
        check_place(self.path)
        require(not (resume and overwrite), "--resume and --overwrite exclude each other: choose one")
        if stored is None:
            require(not resume, f"there is no run in {self.path} to resume: leave --resume out to start one")
            return
        require(
            stored.recipe.name == recipe.name,
            f"{self.path} belongs to recipe {stored.recipe.name}, not {recipe.name}: choose another folder with --out",
        )
        require(
            resume or overwrite,
            f"{self.path} contains a run already: continue it with --resume, choose another folder with --out, "
            "or delete it with --overwrite",
        )
        if overwrite:
            return
        check_epochs(stored.recipe, recipe)
        changed = differences(stored.recipe, recipe, but=(*FREE_ON_RESUME, *stored.unchanged(recipe)))
        require(
            not changed,
            f"the run in {self.path} has other settings ({'; '.join(changed)}): "
            "resume without changing them, or choose another folder with --out",
        )
        stored.check_values(replace(recipe, epochs=stored.recipe.epochs), f"the run in {self.path}")

    def _clear(self) -> None:
        for name in OPTIMIZERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (CURVES_FILE, SUMMARY_FILE, RECIPE_FILE):  # the recipe last, because it marks the folder as a run
            (self.path / name).unlink(missing_ok=True)
