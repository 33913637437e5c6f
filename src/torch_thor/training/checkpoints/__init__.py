"""Checkpoints, the weights that a training starts from, and the folder of a run."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.checkpoints.checkpoint import Checkpoint, newest_whole, open_checkpoint
    from torch_thor.training.checkpoints.finding import find_checkpoints
    from torch_thor.training.checkpoints.run_folder import RunFolder
    from torch_thor.training.checkpoints.saving import Checkpoints, StopSignal, restore
    from torch_thor.training.checkpoints.weights import load_weights

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "RunFolder",
    "StopSignal",
    "find_checkpoints",
    "load_weights",
    "newest_whole",
    "open_checkpoint",
    "restore",
]

_MODULES = {
    "torch_thor.training.checkpoints.checkpoint": ("Checkpoint", "newest_whole", "open_checkpoint"),
    "torch_thor.training.checkpoints.finding": ("find_checkpoints",),
    "torch_thor.training.checkpoints.run_folder": ("RunFolder",),
    "torch_thor.training.checkpoints.saving": ("Checkpoints", "StopSignal", "restore"),
    "torch_thor.training.checkpoints.weights": ("load_weights",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
