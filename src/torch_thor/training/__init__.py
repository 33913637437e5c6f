"""The training application: recipes, data, models, the loop, checkpoints, evaluation and reports."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.config.phases import Phase
    from torch_thor.training.config.recipe import Recipe
    from torch_thor.training.config.recipe_files import load_recipe, recipe_list, recipe_names
    from torch_thor.training.config.recipe_text import override, parse_recipe, recipe_yaml
    from torch_thor.training.config.run_config import RunConfig
    from torch_thor.training.config.schedules.spec import ScheduleSpec
    from torch_thor.training.engine.evaluation import Score, evaluate
    from torch_thor.training.engine.history import EvalPoint, History, RefreshPoint, StepPoint
    from torch_thor.training.engine.loop import Callback, Run, train
    from torch_thor.training.engine.parallel import resolve_device
    from torch_thor.training.errors import (
        DamagedCheckpointError,
        DivergedError,
        ElsewhereError,
        StoppedError,
        UserError,
    )
    from torch_thor.training.evaluating import SavedScore, evaluate_saved
    from torch_thor.training.experiment import image_run, new_run, run_recipe
    from torch_thor.training.exporting import export
    from torch_thor.training.tasks.task import Batch, EvaluationTask, Loss, Metric, Task, Terms, primary

__all__ = [
    "Batch",
    "Callback",
    "DamagedCheckpointError",
    "DivergedError",
    "ElsewhereError",
    "EvalPoint",
    "EvaluationTask",
    "History",
    "Loss",
    "Metric",
    "Phase",
    "Recipe",
    "RefreshPoint",
    "Run",
    "RunConfig",
    "SavedScore",
    "ScheduleSpec",
    "Score",
    "StepPoint",
    "StoppedError",
    "Task",
    "Terms",
    "UserError",
    "evaluate",
    "evaluate_saved",
    "export",
    "image_run",
    "load_recipe",
    "new_run",
    "override",
    "parse_recipe",
    "primary",
    "recipe_list",
    "recipe_names",
    "recipe_yaml",
    "resolve_device",
    "run_recipe",
    "train",
]

_MODULES = {
    "torch_thor.training.config.phases": ("Phase",),
    "torch_thor.training.config.recipe": ("Recipe",),
    "torch_thor.training.config.recipe_files": ("load_recipe", "recipe_list", "recipe_names"),
    "torch_thor.training.config.recipe_text": ("override", "parse_recipe", "recipe_yaml"),
    "torch_thor.training.config.run_config": ("RunConfig",),
    "torch_thor.training.config.schedules.spec": ("ScheduleSpec",),
    "torch_thor.training.engine.evaluation": ("Score", "evaluate"),
    "torch_thor.training.engine.history": ("EvalPoint", "History", "RefreshPoint", "StepPoint"),
    "torch_thor.training.engine.loop": ("Callback", "Run", "train"),
    "torch_thor.training.engine.parallel": ("resolve_device",),
    "torch_thor.training.errors": (
        "DamagedCheckpointError",
        "DivergedError",
        "ElsewhereError",
        "StoppedError",
        "UserError",
    ),
    "torch_thor.training.evaluating": ("SavedScore", "evaluate_saved"),
    "torch_thor.training.experiment": ("image_run", "new_run", "run_recipe"),
    "torch_thor.training.exporting": ("export",),
    "torch_thor.training.tasks.task": ("Batch", "EvaluationTask", "Loss", "Metric", "Task", "Terms", "primary"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
