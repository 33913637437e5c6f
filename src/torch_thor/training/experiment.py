"""A recipe from beginning to end: train each optimizer in turn, then report."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from torch_thor.training import checkpoint
from torch_thor.training.callbacks import Bar, TensorBoard
from torch_thor.training.data import DataBundle, load_data
from torch_thor.training.errors import UserError, require
from torch_thor.training.evaluation import Score, evaluate
from torch_thor.training.loop import Run, resolve_device, train
from torch_thor.training.metrics import MetricsFile
from torch_thor.training.models import build_model, check_fits
from torch_thor.training.optimizers import build_optimizer
from torch_thor.training.recipe import Recipe, parse_recipe, recipe_yaml
from torch_thor.training.refresh_plot import draw_refreshes
from torch_thor.training.report import (
    Summary,
    as_json,
    draw_curves,
    refresh_table,
    refreshed_layers,
    summary_table,
)
from torch_thor.training.runfolder import CURVES_FILE, SUMMARY_FILE, RunFolder
from torch_thor.training.saving import Checkpoints, StopSignal, restore


def run_recipe(
    recipe: Recipe, out: Path, console: Console, *, resume: bool = False, overwrite: bool = False
) -> list[Summary]:
    """Train a recipe's optimizers one after the other and write the run folder.

    Args:
        recipe: The recipe.
        out: The run folder.
        console: Where the bar and the table go.
        resume: Go on with the run in `out`.
        overwrite: Throw away the run in `out`.

    Returns:
        One summary for each optimizer.
    """
    folder = RunFolder(out)
    folder.check(recipe, resume=resume, overwrite=overwrite)
    data = load_data(recipe.data).to(resolve_device(recipe.device))
    new_run(recipe, recipe.optimizer[0], data)  # a recipe that cannot start must not touch the folder
    folder.claim(recipe, resume=resume, overwrite=overwrite)
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[accuracy]}"),
    )
    summaries = []
    with (
        _threads(recipe.threads),
        StopSignal().listening() as stop,
        Progress(*columns, console=console) as progress,
    ):
        tasks = [progress.add_task(name, start=False, total=None, loss="", accuracy="") for name in recipe.optimizer]
        for name, task in zip(recipe.optimizer, tasks, strict=True):
            bar = Bar(progress, task)
            summaries.append(_train_one(recipe, name, data, folder, bar, stop, progress.console.print))
    _report(recipe, folder, summaries, console)
    return summaries


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def new_run(recipe: Recipe, optimizer: str, data: DataBundle) -> Run:
    """A run of one optimizer, before its first step.

    Args:
        recipe: The recipe.
        optimizer: Which of its optimizers.
        data: The data, on the device to train on.

    Returns:
        The run; its weights are a function of the recipe's seed.
    """
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model, data.channels, data.classes)
    # convolutions are faster in channels_last, on a CPU too, and for every optimizer alike
    model = model.to(data.train_images.device).to(memory_format=torch.channels_last)
    check_fits(recipe.model, model, data.train_images.shape[1:], data.classes)
    return Run(model, build_optimizer(optimizer, model, recipe.optimizers[optimizer]), data, recipe)


def _train_one(
    recipe: Recipe,
    name: str,
    data: DataBundle,
    folder: RunFolder,
    bar: Bar,
    stop: StopSignal,
    say: Callable[[str], None],
) -> Summary:
    run = new_run(recipe, name, data)
    saved = checkpoint.newest_whole(folder.checkpoints(name), say)
    if saved is not None:
        restore(run, saved, folder.metrics(name))
        say(f"{name}: goes on from step {run.step} of {run.total_steps}")
    folder.metrics(name).parent.mkdir(exist_ok=True)
    metrics = MetricsFile(folder.metrics(name))
    tensorboard = TensorBoard(folder.tensorboard(name))
    checkpoints = Checkpoints(
        folder.checkpoints(name),
        metrics,
        stop,
        interval=recipe.checkpoint_interval,
        keep=recipe.keep_checkpoints,
        optimizer=name,
        recipe=recipe_yaml(recipe),
    )
    try:
        record = train(run, [metrics, tensorboard, bar, checkpoints])
    finally:
        metrics.close()
        tensorboard.close()
    return Summary(name, record, refreshed_layers(run.optimizer, record))


def _report(recipe: Recipe, folder: RunFolder, summaries: list[Summary], console: Console) -> None:
    draw_curves(summaries, folder.path / CURVES_FILE)
    results = [as_json(summary, recipe.targets) for summary in summaries]
    (folder.path / SUMMARY_FILE).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for summary in summaries:
        if summary.refreshed:
            draw_refreshes(summary.record, [layer.layer for layer in summary.refreshed], folder.refreshes(summary.name))
            console.print(refresh_table(summary))
    console.print(summary_table(summaries, recipe.targets))
    console.print(f"Curves, metrics, recipe and checkpoints are in {folder.path}", soft_wrap=True)


def evaluate_saved(path: Path, say: Callable[[str], None]) -> dict[str, tuple[int, Score]]:
    """Evaluate a checkpoint, or the newest whole checkpoint of every optimizer in a run folder.

    Args:
        path: A run folder or a checkpoint.
        say: Told, in one line each, which checkpoints were passed over.

    Returns:
        For each optimizer its step and its score.

    Raises:
        UserError: If there is nothing whole to evaluate.
    """
    require(path.exists(), f"{path} does not exist: give a run folder or a checkpoint")
    if checkpoint.is_checkpoint(path):
        found = [checkpoint.open_checkpoint(path)]
    else:
        recipe = RunFolder(path).stored_recipe() if path.is_dir() else None
        if recipe is None:
            raise UserError(f"{path} is neither a run folder nor a checkpoint")
        folders = [RunFolder(path).checkpoints(name) for name in recipe.optimizer]
        found = [saved for folder in folders if (saved := checkpoint.newest_whole(folder, say)) is not None]
        require(bool(found), f"{path} holds no checkpoint yet: train it on with --resume")
    scores = {}
    for saved in found:
        recipe = parse_recipe(saved.recipe_text, "unnamed", [])
        data = load_data(recipe.data).to(resolve_device(recipe.device))
        model = build_model(recipe.model, data.channels, data.classes).to(data.test_images.device)
        saved.load_weights(model)
        scores[saved.optimizer] = (
            saved.step,
            evaluate(model, data.test_images, data.test_labels, data.classes),
        )
    return scores
