"""A run's folder: whose it is, what stands in it, and when it may be written to.

recipe.yaml  curves.png  summary.json
<optimizer>/metrics.jsonl  <optimizer>/checkpoints/  <optimizer>/tensorboard/  <optimizer>/refreshes.png
<optimizer>/profile/
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from torch_thor.training.errors import UserError, require
from torch_thor.training.lengthening import check_epochs
from torch_thor.training.optimizers import OPTIMIZERS
from torch_thor.training.recipe import FREE_ON_RESUME, Recipe, differences, parse_recipe, recipe_yaml

RECIPE_FILE = "recipe.yaml"
CURVES_FILE = "curves.png"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class RunFolder:
    """Where a run's files are.

    Args:
        path: The run's folder.
    """

    path: Path

    def metrics(self, optimizer: str) -> Path:
        """One optimizer's metrics file.

        Args:
            optimizer: Its name.

        Returns:
            The path.
        """
        return self.path / optimizer / "metrics.jsonl"

    def checkpoints(self, optimizer: str) -> Path:
        """One optimizer's checkpoints.

        Args:
            optimizer: Its name.

        Returns:
            The path of their folder.
        """
        return self.path / optimizer / "checkpoints"

    def tensorboard(self, optimizer: str) -> Path:
        """One optimizer's event files.

        Args:
            optimizer: Its name.

        Returns:
            The path of their folder.
        """
        return self.path / optimizer / "tensorboard"

    def profile(self, optimizer: str) -> Path:
        """One optimizer's traces of a few steps, for `--profile`.

        Args:
            optimizer: Its name.

        Returns:
            The path of their folder.
        """
        return self.path / optimizer / "profile"

    def refreshes(self, optimizer: str) -> Path:
        """The picture of what one optimizer refreshed.

        Args:
            optimizer: Its name.

        Returns:
            The path.
        """
        return self.path / optimizer / "refreshes.png"

    def stored_recipe(self) -> Recipe | None:
        """The recipe that this folder was made with.

        Returns:
            The recipe, or `None` if there is nothing here yet.

        Raises:
            UserError: If the folder holds something that is no run.
        """
        file = self.path / RECIPE_FILE
        if not file.is_file():
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise UserError(f"{self.path} is not a run folder and not empty: choose another with --out")
            return None
        try:
            return parse_recipe(file.read_text(encoding="utf-8"), "unnamed", [])
        except UserError as error:
            raise UserError(
                f"{file} is not a recipe of this version ({error}): choose another folder with --out"
            ) from error

    def claim(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """Make the folder this recipe's, or refuse before anything is touched.

        Args:
            recipe: The recipe to run.
            resume: Go on with the run that is here.
            overwrite: Throw away the run that is here.
        """
        self.check(recipe, resume=resume, overwrite=overwrite)
        stored = self.stored_recipe()
        if overwrite and not resume:
            self._clear()
            stored = None
        if stored != recipe:  # there is none, or a resumed run has changed what it may
            self.path.mkdir(parents=True, exist_ok=True)
            temporary = self.path / f"{RECIPE_FILE}.writing"
            temporary.write_text(recipe_yaml(recipe), encoding="utf-8")
            temporary.rename(self.path / RECIPE_FILE)

    def check(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder that this run may not write to; nothing is touched.

        Args:
            recipe: The recipe to run.
            resume: Go on with the run that is here.
            overwrite: Throw away the run that is here.
        """
        stored = self.stored_recipe()
        require(not (resume and overwrite), "--resume and --overwrite exclude each other: choose one")
        if stored is None:
            require(not resume, f"there is no run in {self.path} to resume: leave --resume out to start one")
            return
        require(
            stored.name == recipe.name,
            f"{self.path} belongs to recipe {stored.name}, not {recipe.name}: choose another with --out",
        )
        require(
            resume or overwrite,
            f"{self.path} holds a run already: go on with --resume, choose another folder with --out, "
            "or throw it away with --overwrite",
        )
        if resume:
            check_epochs(stored, recipe)
        changed = differences(stored, recipe, but=FREE_ON_RESUME)
        require(
            overwrite or not changed,
            f"the run in {self.path} has other settings ({'; '.join(changed)}): "
            "resume without changing them, or choose another folder with --out",
        )

    def _clear(self) -> None:
        for name in OPTIMIZERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (
            CURVES_FILE,
            SUMMARY_FILE,
            RECIPE_FILE,
        ):  # the recipe last: until then the folder is known as ours
            (self.path / name).unlink(missing_ok=True)
