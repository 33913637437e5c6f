"""The paths of the files in a run folder.

    recipe.yaml       the recipe as run               curves.png     loss and primary metric of all optimizers
    .lock             who writes to the folder        summary.json   the results as plain values

and for each optimizer in a folder of its name

    metrics.jsonl     every step, refresh and evaluation
    checkpoints/      the newest ones, and in best/ the one of the best evaluation
    refreshes.png     which layers were refreshed, for optimizers that have curvature
    tensorboard/      event files
    profile/          traces of a few steps, with --profile
"""

from dataclasses import dataclass
from pathlib import Path

RECIPE_FILE = "recipe.yaml"
CURVES_FILE = "curves.png"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class RunPaths:
    """The paths in a run's folder.

    Args:
        path: The folder.
    """

    path: Path

    def metrics(self, optimizer: str) -> Path:
        """Return the path of an optimizer's metrics file.

        Args:
            optimizer: The optimizer's name.

        Returns:
            The path.
        """
        return self.path / optimizer / "metrics.jsonl"

    def checkpoints(self, optimizer: str) -> Path:
        """Return the path of an optimizer's checkpoints.

        Args:
            optimizer: The optimizer's name.

        Returns:
            The path of their folder.
        """
        return self.path / optimizer / "checkpoints"

    def tensorboard(self, optimizer: str) -> Path:
        """Return the path of an optimizer's event files.

        Args:
            optimizer: The optimizer's name.

        Returns:
            The path of their folder.
        """
        return self.path / optimizer / "tensorboard"

    def profile(self, optimizer: str) -> Path:
        """Return the path of an optimizer's traces of a few steps, for `--profile`.

        Args:
            optimizer: The optimizer's name.

        Returns:
            The path of their folder.
        """
        return self.path / optimizer / "profile"

    def refreshes(self, optimizer: str) -> Path:
        """Return the picture of what one optimizer refreshed.

        Args:
            optimizer: The optimizer's name.

        Returns:
            The path.
        """
        return self.path / optimizer / "refreshes.png"
