"""Running a recipe: training with each of its optimizers in turn, in one run folder, then the report."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from rich.console import Console

from torch_thor.training import checkpoint, weights
from torch_thor.training.errors import StoppedError, require
from torch_thor.training.folder import RunFolder
from torch_thor.training.loop import Observer, Run, train
from torch_thor.training.observers import observers_of
from torch_thor.training.optimizers import build_optimizer
from torch_thor.training.parallel import Ranks, RankWeight, agreed, connect, divide, processes
from torch_thor.training.precision import Precision, averaged
from torch_thor.training.recipe import Recipe
from torch_thor.training.signals import listening
from torch_thor.training.summary import report
from torch_thor.training.tasks import Task, open_task


def build(recipe: Recipe, name: str, task: Task, ranks: Ranks, *, resumed: bool = False) -> Run:
    """Build a run of one optimizer, before its first step.

    Args:
        recipe: The recipe.
        name: The name of one of its optimizers.
        task: The recipe's task.
        ranks: The process among those that train together.
        resumed: Whether a checkpoint will be loaded; the file of `weights` is then not needed.

    Returns:
        The run. Its weights depend only on the recipe's seed, or are those of `weights`.
    """
    torch.manual_seed(recipe.seed)
    model = task.model()
    if recipe.weights is not None and not resumed:
        weights.load(model, recipe, task)
    divided = recipe.parallel != "ddp" and ranks.world > 1
    model = model if divided else model.to(ranks.device)  # the whole of a divided one may be too large for a device
    average = averaged(model, recipe.ema_decay)  # before the optimizer: a copy would keep its hooks
    if divided:
        divide([model] if average is None else [model, average.module], recipe, ranks)
    optimizer = build_optimizer(name, model, recipe.optimizers.get(name, {}))
    if ranks.rank:
        torch.manual_seed(recipe.seed + ranks.rank)  # the same weights, but not the same dropout
    weight = RankWeight()
    net = connect(model, ranks, weight)
    if recipe.compile:
        net = torch.compile(net)  # type: ignore[assignment]
    precision = Precision(recipe.precision, recipe.loss_scale, ranks.device)
    return Run(recipe, name, task, model, net, optimizer, precision, ranks, weight, average)


def run_recipe(
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
) -> None:
    """Train with each optimizer of a recipe, one after the other, and write the run folder.

    Args:
        recipe: The recipe.
        folder: The run folder.
        console: Where progress and the final table are printed.
        resume: Whether to continue the run in the folder.
        overwrite: Whether to delete the run in the folder.
        profile: Whether to profile a few steps of each optimizer.

    Raises:
        UserError: If the recipe cannot be run, or the folder may not be written to.
        StoppedError: If a signal stopped the training; a checkpoint is saved.
    """
    with processes(recipe) as ranks, listening() as stops:
        recipe = ranks.broadcast(recipe)  # all train what the first process was asked to
        say = ranks.first_says(console)
        with agreed(ranks):
            task = open_task(recipe, ranks.device, say)
        # the first run is built before the folder is changed: a recipe that cannot start must leave it as it was
        with agreed(ranks), folder.locked() if ranks.first else nullcontext():
            recipe, resume = ranks.broadcast(folder.admit(recipe, resume, overwrite) if ranks.first else None)
            pending: dict[str, Run] = {}
            ...
