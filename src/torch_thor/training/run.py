"""Running a recipe: training with each of its optimizers in turn, in one run folder.

Then what is trained is used.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torch_thor.errors import require
from torch_thor.files import check_place, whole_folder, writing
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.printing import is_first_rank, lasting_output, printer
from torch_thor.training import (
    initial_weights as weights,
)
from torch_thor.training import (
    recipe_schedules as schedules,
)
from torch_thor.training.checkpoint import Checkpoint, newest, newest_first
from torch_thor.training.checkpoint_saving import Saver, listening, settle
from torch_thor.training.evaluation import counted
from torch_thor.training.folder import RunFolder
from torch_thor.training.loop import Run, split, train
from torch_thor.training.models.bert import CONFIGURATION
from torch_thor.training.observers import observers_of
from torch_thor.training.optimizers import build_optimizer, measured_split_dim
from torch_thor.training.origin import stored_origin
from torch_thor.training.parallel import Ranks, RankWeight, agreed, connect, divide, processes
from torch_thor.training.precision import Precision, averaged
from torch_thor.training.recipe_model import Recipe, absolute, path_of
from torch_thor.training.recipes import override
from torch_thor.training.summary import read, report
from torch_thor.training.tasks.opening import open_task, task_class
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
    with agreed(ranks):
        if recipe.weights is not None and not resumed:
            weights.load(model, recipe, task)
    divided = recipe.parallel != "ddp" and ranks.world > 1
    # A network that is divided may be too large for a single device.
    model = model if divided else model.to(ranks.device)
    average = averaged(model, recipe.ema_decay)  # before the optimizer: a copy would keep its hooks
    if divided:
        divide([model] if average is None else [model, average.module], recipe, ranks)

    def split_dim() -> int:
        with agreed(ranks), torch.random.fork_rng([]):
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


def placed(recipe: Recipe) -> Recipe:
    """Return a recipe that names the same files in any working folder."""
    changes: dict[str, Any] = {}
    if recipe.data.root is not None:
        root = absolute("data.root", recipe.data.root)
        changes["data"] = recipe.data.model_copy(update={"root": root})
    if recipe.weights is not None:
        changes["weights"] = absolute("weights", recipe.weights)
    if recipe.model.endswith(CONFIGURATION):
        changes["model"] = str(Path(recipe.model).absolute())
    return recipe.model_copy(update=changes)


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
    """
    with lasting_output(), processes(recipe) as ranks, ExitStack() as stack:
        say = printer(console) if ranks.first else lambda _: None
        with agreed(ranks):
            if ranks.first:
                stack.enter_context(folder.locked())
                recipe = placed(weights.checksum(recipe, say))
                resume = folder.admit(recipe, resume, overwrite, say)
        # All processes train what the first one was asked to.
        recipe, resume = ranks.broadcast((recipe, resume))
        with agreed(ranks):
            task = open_task(recipe, ranks.device, say)
            if resume and ranks.first:
                _check_checkpoints(folder, task)
        # the first run is built before the folder is changed: a recipe that cannot start must leave
        # it as it was
        pending = {
            recipe.optimizer[0]: _begin(
                recipe, recipe.optimizer[0], task, ranks, folder, resume, say
            )
        }
        with agreed(ranks):
            if ranks.first:
                folder.claim(recipe, resume, overwrite)
        path = ranks.broadcast(folder.path)  # a new run's, if another took the name meanwhile
        folder = folder if ranks.first else RunFolder(path)
        with listening() as stops, folder.present() if ranks.first else nullcontext():
            for name in recipe.optimizer:
                # no other reference is kept, so that a finished run is freed before the next one is
                # built
                begun = pending.pop(name, None) or _begin(
                    recipe, name, task, ranks, folder, resume, say
                )
                _train(*begun, folder, console, profile, stops)
                del begun
            if ranks.first:
                report(folder, recipe, task, console)


def _check_checkpoints(folder: RunFolder, task: Task) -> None:
    """Refuse a run that has lost checkpoints: it would begin anew, and lose its metrics too."""
    begun = folder.begun()
    assert begun is not None  # else nothing continues
    for name in begun.optimizer:
        metrics, checkpoints = folder.metrics(name), folder.checkpoints(name)
        if newest_first(checkpoints) or not metrics.is_file():
            continue
        # a run may have been killed while it wrote the first one
        first = begun.checkpoint_interval or task.steps_per_epoch
        last = max((line["step"] for line in read(metrics)), default=0)
        require(
            last <= first and not folder.summary.exists(),
            f"{checkpoints} has no checkpoint, but {metrics} has {last} steps: put the checkpoints "
            "back, or start again with --overwrite or --out",
        )


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
    with agreed(ranks):
        saved = newest(folder.checkpoints(name), say) if resume and ranks.first else None
    saved = ranks.broadcast(saved)
    with agreed(ranks):
        run = build(recipe, name, task, ranks, resumed=saved is not None)
    if saved is None:
        return run, 0
    saved.restore(run, say)
    say(f"{name}: continues from step {run.step} of {run.total_steps}")
    return run, saved.offset


def _train(
    run: Run, offset: int, folder: RunFolder, console: Console, profile: bool, stops: Sequence[int]
) -> None:
    observers: list[Any] = []  # the first is that of the metrics
    with agreed(run.ranks):
        if run.ranks.first:
            observers = observers_of(run, folder, console, profile, offset)
            with suppress(OSError):  # of which the next checkpoint tells
                # A process may have been killed after its last checkpoint.
                settle(folder.checkpoints(run.name), run)

    def offset_now() -> int:
        folder.check_present()  # a checkpoint would make a new folder, without what was in it
        return int(observers[0].offset())

    saver = Saver(folder.checkpoints(run.name), offset_now)
    # The profiler is the last, so that the work of other observers is not in its table.
    train(run, [*observers[:1], saver, *observers[1:]], stops=stops)


@dataclass(frozen=True)
class SavedScore:
    """The evaluation of a checkpoint's weights, or averaged weights: metrics and their values.

    A value that is not finite is None, as in `metrics.jsonl`. `number` counts what the metrics are
    means over, in the `unit` of the task, such as images.
    """

    optimizer: str
    averaged: bool
    step: int
    path: Path
    metrics: Sequence[Metric]
    values: Mapping[str, float | None]
    number: int
    unit: str


def evaluate_saved(
    path: Path, words: Sequence[str], say: Callable[[str], None]
) -> list[SavedScore]:
    """Evaluate a checkpoint, or the newest undamaged one of every optimizer in a run folder.

    Under `torchrun` the processes share the data. The scores are then bit for bit those of one
    process.

    Args:
        path: A run folder, a checkpoint, or a folder of checkpoints.
        words: `key=value` words that override the keys in `CHANGEABLE`.
        say: Prints a line; it is called once for each damaged checkpoint and each unreadable image.

    Returns:
        A score for each optimizer, and one for its averaged weights if it has any.
    """
    checkpoints = weights.find_checkpoints(path, say if is_first_rank() else lambda _: None)
    recipes = [_with_words(saved, words) for saved in checkpoints]
    scores = []
    with processes(recipes[0]) as ranks:
        say = say if ranks.first else lambda _: None
        for saved, recipe in zip(checkpoints, recipes, strict=True):
            with agreed(ranks):
                task = open_task(recipe, ranks.device, say, train=False)
                saved.check_tokenizer(task)
                model = task.model().to(ranks.device)
                same_set = recipe.data.name == saved.recipe.data.name
                if same_set and "evaluation data" in saved.other_data(task):
                    say(
                        f"{saved.path}: the evaluation data are not those of the training: files "
                        "were added, removed or renamed, or data.root is another folder"
                    )
            for averages in (False, True) if saved.has_average else (False,):
                with agreed(ranks):
                    saved.load_weights(model, averaged=averages)
                measured = counted(task, model, ranks)
                assert measured is not None  # no signal is listened to
                means, number = measured
                values = {
                    name: mean if math.isfinite(mean) else None for name, mean in means.items()
                }
                scores.append(
                    SavedScore(
                        saved.optimizer, averages, saved.step, saved.path, task.metrics, values,
                        number, task.unit,
                    )
                )  # fmt: skip
    return scores


def _with_words(saved: Checkpoint, words: Sequence[str]) -> Recipe:
    """The recipe to evaluate a checkpoint with."""
    # The file of a network may have been moved, so its weights only have to fit.
    moved = ("model",) if saved.recipe.model.endswith(CONFIGURATION) else ()
    for key in (word.partition("=")[0] for word in words):
        require(
            key.split(".")[0] in (*CHANGEABLE, *moved),
            f"{key} cannot be changed for an evaluation, only {', '.join(CHANGEABLE)} and the keys "
            f"inside data can: leave {key} out",
        )
    trained = saved.recipe
    if not any(word.startswith(("data.root=", "data=")) for word in words):
        _check_place(saved)
    recipe = override(trained, words)
    if any(word.startswith("data.transform") for word in words):
        return recipe
    return task_class(trained.task).recipe_of_evaluation(recipe, trained)


def _check_place(saved: Checkpoint) -> None:
    """Refuse to guess what the relative `data.root` of a recipe's file means in another folder."""
    begun = next(filter(None, map(stored_origin, saved.path.absolute().parents)), None)
    data = {} if begun is None else begun.keys.get("data")
    written, root = data.get("root") if isinstance(data, dict) else None, saved.recipe.data.root
    if begun is None or root is None or not isinstance(written, str):
        return
    here, trained = (path_of("data.root", absolute("data.root", text)) for text in (written, root))
    replaced = not trained.match(written)  # by a word of the training
    require(
        replaced or here.resolve() == trained.resolve(),
        f"data.root={written} in {begun.name} is {here} in this folder, and was {trained} in the "
        f"training: add data.root={root}, or the folder that you mean",
    )


def export(
    path: Path, out: Path, form: str, say: Callable[[str], None], *, averaged: bool = False
) -> None:
    """Write a trained network and its tokenizer as transformers' `from_pretrained` reads them.

    Args:
        path: A checkpoint, or a folder with the checkpoints of one optimizer.
        out: The folder to write. It must not exist yet.
        form: The name of the format: transformers.
        say: Prints a line: for each damaged checkpoint that is skipped, and at the end.
        averaged: Whether to export the averaged weights.
    """
    require(form == "transformers", f"--format {form} must be transformers")
    saved = weights.the_checkpoint(path, str(path), say)
    recipe = saved.recipe
    require(
        task_class(recipe.task).is_exported,
        f"{path} is of task={recipe.task}, which transformers has no form for: networks of "
        "masked-lm are exported",
    )
    require(
        not averaged or saved.has_average, f"{path} has no averaged weights: leave --averaged out"
    )
    require(not out.exists(), f"--out {out} exists: give another folder")
    check_place(out)
    task: Any = open_task(recipe, torch.device("cpu"), say, train=False)
    saved.check_tokenizer(task)
    model = task.model()
    saved.load_weights(model, averaged=averaged)
    with writing(out, "make room for it, then give the same command again"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as folder:
            model.save_pretrained(folder)
            task.tokenizer().save_pretrained(folder)
    say(f"{saved.optimizer}, step {saved.step}: written to {out}")
