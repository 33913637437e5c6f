"""Evaluating what a run has saved, on its own data or on other data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from torch_thor.training.checkpoints import checkpoint
from torch_thor.training.checkpoints.run_folder import RunFolder
from torch_thor.training.config.data_spec import IN_MEMORY
from torch_thor.training.config.recipe import Recipe, override
from torch_thor.training.config.stored_recipe import read_stored
from torch_thor.training.data.named import open_evaluation
from torch_thor.training.engine import parallel
from torch_thor.training.engine.evaluation import Score, evaluate
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.errors import UserError, require
from torch_thor.training.models.classifiers import build_model, check_fits, check_head

KEYS = ("data", "device", "batch_size", "threads")  # what may be said anew: all else made the weights what they are
BATCH = 256  # most images at a time where nothing else is said: those of a step may be of many devices


@dataclass(frozen=True)
class SavedScore:
    """What one set of weights reaches.

    Args:
        optimizer: The optimizer's name in the recipe.
        averaged: Whether they are the averaged weights.
        step: Optimizer steps done.
        path: The checkpoint.
        score: Loss and accuracies.
    """

    optimizer: str
    averaged: bool
    step: int
    path: Path
    score: Score


def evaluate_saved(path: Path, words: Sequence[str], say: Callable[[str], None]) -> list[SavedScore]:
    """Evaluate a checkpoint, or the newest whole checkpoint of every optimizer in a run folder.

    Under `torchrun` the processes share the images; all get the scores of one process, bit for bit.

    Args:
        path: A run folder, a checkpoint, or a folder of checkpoints such as `best`.
        words: `key=value` words, of `KEYS`.
        say: Told, in one line each, what was passed over.

    Returns:
        A score for each optimizer, and one for its averaged weights where there are any.
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
    require(path.exists(), f"{path} does not exist: give a run folder or a checkpoint")
    if checkpoint.is_checkpoint(path):
        return [checkpoint.open_checkpoint(path)]
    if checkpoint.holds_checkpoints(path):
        return [saved for saved in [checkpoint.newest_whole(path, say)] if saved is not None]
    recipe = RunFolder(path).stored_recipe(say) if path.is_dir() else None
    if recipe is None:
        raise UserError(f"{path} is neither a run folder nor a checkpoint")
    folders = [RunFolder(path).checkpoints(name) for name in recipe.optimizer]
    found = [saved for folder in folders if (saved := checkpoint.newest_whole(folder, say)) is not None]
    require(bool(found), f"{path} holds no checkpoint yet: train it on with --resume")
    return found


def _keys(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words]


def _recipe(saved: checkpoint.Checkpoint, words: Sequence[str]) -> Recipe:
    keys = _keys(words)
    for key in keys:
        require(
            key.split(".")[0] in KEYS,
            f"{key} is no key of eval, which takes {', '.join(KEYS)} and what is inside of data: the weights are as "
            f"they were trained; leave {key} out",
        )
    stored = read_stored(saved.recipe_text)
    trained, recipe = stored.recipe, override(stored.recipe, list(words))
    stored.check_values(recipe, str(saved.path), but=[name for key in KEYS for name in (key, f"{key}.")])
    if any(key.startswith("data.transform") for key in keys):
        return recipe
    data = recipe.data
    if data.name not in IN_MEMORY and trained.data.name not in IN_MEMORY:
        data = replace(data, transform=trained.data.crops)  # not those that are usual for the other data set
    sizes = [" x ".join(map(str, shape)) for shape in (data.image_shape, trained.data.image_shape)]
    require(
        sizes[0] == sizes[1],
        f"data.name={data.name} has images of {sizes[0]}, the network was trained on {sizes[1]}: evaluate it on data "
        f"like those, or read images at another size with data.transform.size",
    )
    return replace(recipe, data=data)


def _evaluate(
    saved: checkpoint.Checkpoint, recipe: Recipe, device: torch.device, say: Callable[[str], None], said: set[str]
) -> list[SavedScore]:
    with parallel.agreed():
        data = open_evaluation(recipe.data, device, say)
        outputs = recipe.classes or data.classes
        check_head(outputs, data.classes)
        if "data" in said and outputs > data.classes + 1:  # one more, which is never a label, is the reference's own
            parallel.rank_zero_print(say)(
                f"the data has {data.classes} classes, the network {outputs} outputs: classes are numbered in their "
                f"sorted order, so these must be the first {data.classes} of those that it was trained on"
            )
        model = build_model(recipe.model, data.image_shape[0], outputs)
        model = model.to(device).to(memory_format=torch.channels_last)  # the sums of training's evaluations
        saved.load_weights(model)
        check_fits(recipe.model, model, data.image_shape, outputs)
        batch_size = recipe.batch_size if "batch_size" in said else min(recipe.batch_size, BATCH)
        batches = data.open_evaluation(batch_size=batch_size, shard=parallel.shard())
    scores = []
    for averaged in (False, True) if saved.has_average else (False,):
        with parallel.agreed():
            saved.load_weights(model, averaged=averaged)
        score = evaluate(model, batches, outputs, device)
        scores.append(SavedScore(saved.optimizer, averaged, saved.step, saved.path, score))
    return scores
