"""Finding the checkpoint that a path stands for: `torch-thor eval PATH` and `weights=PATH` accept the same paths.

A path may be a run folder, an optimizer's folder in it, a folder of checkpoints (`checkpoints`, `best`), or one
checkpoint.
"""

from collections.abc import Callable
from pathlib import Path

from torch_thor.training.checkpoints import checkpoint
from torch_thor.training.checkpoints.run_folder import RunFolder
from torch_thor.training.errors import require

ACCEPTED = "a run folder, a checkpoint or a folder of checkpoints"  # for error messages


def find_checkpoints(path: Path, say: Callable[[str], None]) -> list[checkpoint.Checkpoint]:
    """Open the checkpoint that a path stands for, or the newest undamaged one of each optimizer in a run folder.

    Args:
        path: A path that exists.
        say: Prints a line; it is called once for each damaged checkpoint that is skipped.

    Returns:
        One checkpoint for each optimizer; none if the path is not one of those named above.

    Raises:
        DamagedCheckpointError: If there are checkpoints and every one is damaged.
        UserError: If the run folder contains no checkpoint yet.
    """
    if checkpoint.is_checkpoint(path):
        return [checkpoint.open_checkpoint(path)]
    for folder in (path, path / "checkpoints", path / checkpoint.BEST):
        if checkpoint.holds_checkpoints(folder):
            newest = checkpoint.newest_whole(folder, say)
            return [] if newest is None else [newest]
    run = RunFolder(path)
    if not (path.is_dir() and run.is_run()):
        return []
    recipe = run.stored_recipe(say)
    assert recipe is not None
    newest_ones = [checkpoint.newest_whole(run.checkpoints(name), say) for name in recipe.optimizer]
    found = [saved for saved in newest_ones if saved is not None]
    require(bool(found), f"{path} contains no checkpoint yet: continue the training with --resume")
    return found
