"""The paths of the files in a run folder.

    recipe.yaml       the recipe of the run             curves.png     loss and primary metric of all optimizers
    .lock             the process that writes to it     summary.json   the results as JSON

and for each optimizer, in a folder with its name

    metrics.jsonl     every step, refresh and evaluation
    checkpoints/      the newest checkpoints, and in best/ that of the best evaluation
    refreshes.png     the decisions of the trace rule, for optimizers with curvature
    tensorboard/      the event files of TensorBoard
    profile/          traces of a few steps, written with --profile
"""

from dataclasses import dataclass
from pathlib import Path

RECIPE_FILE = "recipe.yaml"
CURVES_FILE = "curves.png"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class RunPaths:
    """The paths in the folder of a run.

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
        """Return the path of an optimizer's TensorBoard files.

        Args:
            optimizer: The optimizer's name.

        Returns:
            The path of their folder.
        """
        return self.path / optimizer / "tensorboard"

    def profile(self, optimizer: str) -> Path:
        """Return the path of the traces that `--profile` writes for an optimizer.

        Args:
            optimizer: The optimizer's name.

        Returns:
            The path of their folder.
        """
        return self.path / optimizer / "profile"

    def refreshes(self, optimizer: str) -> Path:
        """Return the path of the plot of an optimizer's refreshes.

        Args:
            optimizer: The optimizer's name.

        Returns:
            The path.
        """
        return self.path / optimizer / "refreshes.png"
