"""Benchmarks and figures: a runner that stores raw data, and tables and pictures that are made from raw data alone."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.bench import drawing, markdown, script
    from torch_thor.bench.machine import describe, describe_device
    from torch_thor.bench.numbers import final_accuracy, running_mean, steps_to
    from torch_thor.bench.recipes import evaluations_of, run_of, step_of, train_recipe, trained
    from torch_thor.bench.runner import complete, complete_here, missing
    from torch_thor.bench.search import SEEDS, TUNING_SEED, Search, stages
    from torch_thor.bench.stores import Folder, Rows, key_of, write_json, write_tables
    from torch_thor.bench.timing import median_ratio, take_turns, training_step

__all__ = [
    "SEEDS",
    "TUNING_SEED",
    "Folder",
    "Rows",
    "Search",
    "complete",
    "complete_here",
    "describe",
    "describe_device",
    "drawing",
    "evaluations_of",
    "final_accuracy",
    "key_of",
    "markdown",
    "median_ratio",
    "missing",
    "run_of",
    "running_mean",
    "script",
    "stages",
    "step_of",
    "steps_to",
    "take_turns",
    "train_recipe",
    "trained",
    "training_step",
    "write_json",
    "write_tables",
]

_MODULES = {
    "torch_thor.bench.machine": ("describe", "describe_device"),
    "torch_thor.bench.numbers": ("final_accuracy", "running_mean", "steps_to"),
    "torch_thor.bench.recipes": ("evaluations_of", "run_of", "step_of", "train_recipe", "trained"),
    "torch_thor.bench.runner": ("complete", "complete_here", "missing"),
    "torch_thor.bench.search": ("SEEDS", "TUNING_SEED", "Search", "stages"),
    "torch_thor.bench.stores": ("Folder", "Rows", "key_of", "write_json", "write_tables"),
    "torch_thor.bench.timing": ("median_ratio", "take_turns", "training_step"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES, ("drawing", "markdown", "script"))
