"""The training application: recipes, data, models, loop, checkpoints, evaluation and reports."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.errors import (
        DamagedCheckpointError,
        DivergedError,
        StoppedError,
        UserError,
    )
    from torch_thor.training.evaluation import evaluate
    from torch_thor.training.loop import Observer, Point, Record, Run, Score, train
    from torch_thor.training.parallel import Ranks, device_of
    from torch_thor.training.recipe import Recipe
    from torch_thor.training.recipes import (
        load_recipe,
        override,
        recipe_list,
        recipe_names,
        to_yaml,
    )
    from torch_thor.training.run import SavedScore, build, evaluate_saved, export, run_recipe
    from torch_thor.training.tasks.opening import open_task
    from torch_thor.training.tasks.task import Batch, Loss, Metric, Task, Terms, primary

__all__ = [
    "Batch",
    "DamagedCheckpointError",
    "DivergedError",
    "Loss",
    "Metric",
    "Observer",
    "Point",
    "Ranks",
    "Recipe",
    "Record",
    "Run",
    "SavedScore",
    "Score",
    "StoppedError",
    "Task",
    "Terms",
    "UserError",
    "build",
    "device_of",
    "evaluate",
    "evaluate_saved",
    "export",
    "load_recipe",
    "open_task",
    "override",
    "primary",
    "recipe_list",
    "recipe_names",
    "run_recipe",
    "to_yaml",
    "train",
]

_MODULES = {
    "torch_thor.training.errors": (
        "DamagedCheckpointError",
        "DivergedError",
        "StoppedError",
        "UserError",
    ),
    "torch_thor.training.evaluation": ("evaluate",),
    "torch_thor.training.loop": (
        "Observer",
        "Point",
        "Record",
        "Run",
        "Score",
        "train",
    ),
    "torch_thor.training.parallel": (
        "Ranks",
        "device_of",
    ),
    "torch_thor.training.recipe": ("Recipe",),
    "torch_thor.training.recipes": (
        "load_recipe",
        "override",
        "recipe_list",
        "recipe_names",
        "to_yaml",
    ),
    "torch_thor.training.run": (
        "SavedScore",
        "build",
        "evaluate_saved",
        "export",
        "run_recipe",
    ),
    "torch_thor.training.tasks.opening": ("open_task",),
    "torch_thor.training.tasks.task": (
        "Batch",
        "Loss",
        "Metric",
        "Task",
        "Terms",
        "primary",
    ),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
