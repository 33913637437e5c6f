"""Running a recipe: training with each of its optimizers in turn, in one run folder.

Then what is trained is used.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torch_thor.errors import is_first_rank, require
from torch_thor.files import whole_folder
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.printing import printer
from torch_thor.training import recipe_schedules as schedules
from torch_thor.training.checkpoint import (
    Saver,
    find_checkpoints,
    load_initial_weights,
    load_weights,
    newest,
    the_checkpoint,
)
from torch_thor.training.evaluation import evaluate
from torch_thor.training.folder import RunFolder
from torch_thor.training.log import finite, observers_of
from torch_thor.training.loop import Run, listening, split, train
from torch_thor.training.models.bert import CONFIGURATION
from torch_thor.training.optimizers import build_optimizer, measured_split_dim
from torch_thor.training.parallel import Ranks, RankWeight, connect, divide, processes
from torch_thor.training.precision import Precision, averaged
from torch_thor.training.recipe_model import IN_MEMORY, Recipe
from torch_thor.training.recipes import override
from torch_thor.training.summary import report
from torch_thor.training.tasks.opening import open_task
from torch_thor.training.tasks.task import Metric, Task

# An evaluation may change these keys, because the others shaped the weights.
CHANGEABLE = ("data", "device", "batch_size", "threads")


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
        load_initial_weights(model, recipe, task)
    divided = recipe.parallel != "ddp" and ranks.world > 1
    # A network that is divided may be too large for a single device.
    model = model if divided else model.to(ranks.device)
    average = averaged(model, recipe.ema_decay)  # before the optimizer: a copy would keep its hooks
    if divided:
        divide([model] if average is None else [model, average.module], recipe, ranks)

    def split_dim() -> int:
        with torch.random.fork_rng([]):
            batch = split(next(task.batches(ranks, 0)), recipe.accumulation_at(0))[0]
            number = (
                measured_split_dim(model, lambda net: task.loss(net, batch).mean, name)
                if ranks.first
                else 0
            )
        return int(ranks.broadcast(number))

    optimizer = build_optimizer(
        name, model, recipe.optimizers.get(name, {}), sample=None if resumed else split_dim
    )
    schedules.check(optimizer, recipe, task.steps_per_epoch)
    if ranks.rank:
        torch.manual_seed(recipe.seed + ranks.rank)  # the same weights, but not the same dropout
    weight = RankWeight()
    net = connect(model, ranks, weight)
    if recipe.compile:
        net = torch.compile(net)  # type: ignore[assignment]
    precision = Precision(recipe.precision, recipe.loss_scale, ranks.device)
    if isinstance(optimizer, CurvatureOptimizer):
        optimizer.grad_scaler = precision.scaler
    return Run(recipe, name, task, model, net, optimizer, precision, ranks, weight, average)


def run_recipe(
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Train with each optimizer of a recipe, one after the other, and write the run folder.

    Args:
        recipe: The recipe.
        folder: The run folder.
        console: Where progress and the final table are printed.
        resume: Whether to continue the run in the folder.
        overwrite: Whether to delete the run in the folder.
    """
    if not (resume or overwrite):
        folder.check_free()
    with processes(recipe) as ranks, ExitStack() as stack:
        say = printer(console) if ranks.first else lambda _: None
        task = open_task(recipe, ranks.device, say)
        # the first run is built before the folder is changed: a recipe that cannot start must leave
        # it as it was
        begun = _begin(recipe, recipe.optimizer[0], task, ranks, folder, resume, say)
        if ranks.first:
            stack.enter_context(folder.begin(recipe, resume=resume, overwrite=overwrite))
        stops = stack.enter_context(listening())
        _train(*begun, folder, console, stops)
        for name in recipe.optimizer[1:]:
            del begun  # a finished run is freed before the next is built
            begun = _begin(recipe, name, task, ranks, folder, resume, say)
            _train(*begun, folder, console, stops)
        if ranks.first:
            report(folder, recipe, task, console)


def _begin(
    recipe: Recipe,
    name: str,
    task: Task,
    ranks: Ranks,
    folder: RunFolder,
    resume: bool,
    say: Callable[[str], None],
) -> tuple[Run, int]:
    """Build or continue a run; return it, and the length of its metrics file."""
    saved = newest(folder.checkpoints(name), say) if resume and ranks.first else None
    saved = ranks.broadcast(saved)
    run = build(recipe, name, task, ranks, resumed=saved is not None)
    if saved is None:
        return run, 0
    saved.restore(run, say)
    say(f"{name}: continues from step {run.step} of {run.total_steps}")
    return run, saved.offset


def _train(
    run: Run, offset: int, folder: RunFolder, console: Console, stops: Sequence[int]
) -> None:
    # the metrics use the first
    observers: list[Any] = observers_of(run, folder, console, offset) if run.ranks.first else []
    saver = Saver(folder.checkpoints(run.name), lambda: int(observers[0].offset()))
    train(run, [*observers[:1], saver, *observers[1:]], stops=stops)
    if run.ranks.world == 1 and hasattr(run.task, "sample"):
        printer(console)(f"{run.name} writes: {run.task.sample(run.model)}")


def evaluate_saved(
    path: Path, words: Sequence[str], say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], Sequence[Metric]]:
    """Evaluate a checkpoint, or the newest undamaged checkpoint of every optimizer in a run folder.

    Under `torchrun` the processes share the data. The values are then bit for bit those of one
    process.

    Args:
        path: A run folder, a checkpoint, or a folder of checkpoints.
        words: `key=value` words that override the keys in `CHANGEABLE`.
        say: Prints a line; it is called once for each damaged checkpoint and each unreadable image.

    Returns:
        A row for each optimizer, and one for its averaged weights if it has any, of JSON values by
        name: the metrics, None where a value is not finite; and under the `unit` of the task, what
        they are means over, such as the number of images. Then the metrics of the task.
    """
    say = say if is_first_rank() else lambda _: None
    # weights are read at once: a training that goes on removes old checkpoints
    found = [
        (
            saved,
            _with_words(saved.recipe, words),
            {kind: saved.weights(kind) for kind in saved.kinds},
        )
        for saved in find_checkpoints(path, say)
    ]
    rows = []
    with processes(found[0][1]) as ranks:
        for saved, recipe, weights in found:
            task = open_task(recipe, ranks.device, say, train=False, data=saved.data)
            model = task.model().to(ranks.device)
            for averaged, tensors in weights.items():
                load_weights(model, tensors, str(saved.path))
                measured = evaluate(task, model, ranks)
                assert measured is not None  # no signal is listened to
                rows.append(
                    {
                        "optimizer": saved.optimizer,
                        "averaged": averaged,
                        "step": saved.step,
                        "path": str(saved.path),
                        task.unit.replace(" ", "_"): measured[1],
                        **finite(measured[0]),
                    }
                )
    return rows, task.metrics


def _with_words(trained: Recipe, words: Sequence[str]) -> Recipe:
    """Return the recipe to evaluate a checkpoint with."""
    # The file of a network may have been moved, so its weights only have to fit.
    moved = ("model",) if trained.model.endswith(CONFIGURATION) else ()
    for key in (word.partition("=")[0] for word in words):
        require(
            key.split(".")[0] in (*CHANGEABLE, *moved),
            f"{key} cannot be changed for an evaluation, only {', '.join(CHANGEABLE)} and the keys "
            f"inside data can: leave {key} out",
        )
    recipe = override(trained, words)
    if {recipe.data.name, trained.data.name} & IN_MEMORY.keys() or recipe.data.transform:
        return recipe
    # other images are cropped and normalised as in the training
    data = recipe.data.model_copy(update={"transform": trained.data.crops})
    return recipe.model_copy(update={"data": data})


def export(path: Path, out: Path, say: Callable[[str], None], *, averaged: bool = False) -> None:
    """Write a trained network and its tokenizer as transformers' `from_pretrained` reads them.

    Args:
        path: A checkpoint, or a folder with the checkpoints of one optimizer.
        out: The folder to write. It must not exist yet.
        say: Prints a line: for each damaged checkpoint that is skipped, and at the end.
        averaged: Whether to export the averaged weights.
    """
    saved = the_checkpoint(path, say)
    require(
        saved.recipe.task == "masked-lm",
        f"{path} is of task={saved.recipe.task}, which transformers has no form for: networks of "
        "masked-lm are exported",
    )
    require(averaged in saved.kinds, f"{path} has no averaged weights: leave --averaged out")
    require(not out.exists(), f"--out {out} exists: give another folder")
    task: Any = open_task(saved.recipe, torch.device("cpu"), say, train=False, data=saved.data)
    model: Any = task.model()
    load_weights(model, saved.weights(averaged), str(path))
    with whole_folder(out) as folder:
        model.save_pretrained(folder)
        task.tokenizer().save_pretrained(folder)
    say(f"{saved.optimizer}, step {saved.step}: written to {out}")
