"""Evaluating the checkpoints of a run, on the data of the run or on other data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_thor.training.checkpoints import checkpoint
from torch_thor.training.checkpoints.finding import ACCEPTED, find_checkpoints
from torch_thor.training.checkpoints.vocabulary import check_tokenizer
from torch_thor.training.config.recipe import Recipe
from torch_thor.training.config.recipe_text import override
from torch_thor.training.config.stored_recipe import read_stored
from torch_thor.training.engine import parallel
from torch_thor.training.engine.evaluation import Score, evaluate
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.errors import require
from torch_thor.training.tasks.registry import TASKS
from torch_thor.training.tasks.task import Metric

KEYS = ("data", "device", "batch_size", "threads")  # the keys that may be overridden; the others shaped the weights


@dataclass(frozen=True)
class SavedScore:
    """The evaluation of the weights, or of the averaged weights, of one checkpoint.

    Args:
        optimizer: The optimizer's name in the recipe.
        averaged: Whether the averaged weights were evaluated.
        step: Optimizer steps done.
        path: The checkpoint.
        unit: The name of a loss term in the plural, such as images.
        metrics: The metrics of the task.
        score: Their values.
    """

    optimizer: str
    averaged: bool
    step: int
    path: Path
    unit: str
    metrics: Sequence[Metric]
    score: Score


def evaluate_saved(path: Path, words: Sequence[str], say: Callable[[str], None]) -> list[SavedScore]:
    """Evaluate a checkpoint, or the newest undamaged checkpoint of every optimizer in a run folder.

    Under `torchrun` the processes share the data. The scores are then bit for bit those of one process.

    Args:
        path: A run folder, a checkpoint, or a folder of checkpoints (see `find_checkpoints`).
        words: `key=value` words that override the keys in `KEYS`.
        say: Prints a line; it is called once for each damaged checkpoint and each unreadable image.

    Returns:
        A score for each optimizer, and one for its averaged weights if it has any.

    Raises:
        UserError: If there is no checkpoint, a key cannot be overridden, or the data do not fit the network.
    """
    found = _find(path, parallel.rank_zero_print(say))
    recipes = [_recipe(saved, words) for saved in found]
    device = resolve_device(recipes[0].device)
    with parallel.processes(device), parallel.threads(recipes[0].threads):
        return [
            one
            for saved, recipe in zip(found, recipes, strict=True)
            for one in _evaluate(saved, recipe, device, say, {key.split(".")[0] for key in _keys(words)})
        ]


def _find(path: Path, say: Callable[[str], None]) -> list[checkpoint.Checkpoint]:
    require(path.exists(), f"{path} does not exist: give {ACCEPTED}")
    found = find_checkpoints(path, say)
    require(bool(found), f"{path} is neither a run folder nor a checkpoint: give {ACCEPTED}")
    return found


def _keys(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words]


def _recipe(saved: checkpoint.Checkpoint, words: Sequence[str]) -> Recipe:
    keys = _keys(words)
    for key in keys:
        require(
            key.split(".")[0] in KEYS,
            f"{key} cannot be changed for an evaluation, only {', '.join(KEYS)} and the keys inside data can: leave "
            f"{key} out",
        )
    stored = read_stored(saved.recipe_text)
    trained, recipe = stored.recipe, override(stored.recipe, list(words))
    stored.check_values(recipe, str(saved.path), but=[name for key in KEYS for name in (key, f"{key}.")])
    return TASKS[recipe.task].saved_recipe(trained, recipe, keys)


def _evaluate(
    saved: checkpoint.Checkpoint, recipe: Recipe, device: torch.device, say: Callable[[str], None], said: set[str]
) -> list[SavedScore]:
    with parallel.agreed():
        task = TASKS[recipe.task].open_saved(recipe, device, say, said)
        check_tokenizer(saved, task)
        model = task.build_model().to(device)
        saved.load_weights(model)
        batches = task.open_evaluation(parallel.shard())
    scores = []
    for averaged in (False, True) if saved.has_average else (False,):
        with parallel.agreed():
            saved.load_weights(model, averaged=averaged)
        score = evaluate(task, model, batches)
        scores.append(SavedScore(saved.optimizer, averaged, saved.step, saved.path, task.unit, task.metrics(), score))
    return scores
