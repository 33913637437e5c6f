"""A recipe from beginning to end: train each optimizer in turn, then report."""

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from rich.console import Console

from torch_thor.training.callbacks.metrics_file import MetricsFile
from torch_thor.training.callbacks.profiling import Profiler
from torch_thor.training.callbacks.progress import Bar, Display, Lines
from torch_thor.training.callbacks.tensorboard import TensorBoard
from torch_thor.training.checkpoints import checkpoint
from torch_thor.training.checkpoints.run_folder import CURVES_FILE, SUMMARY_FILE, RunFolder
from torch_thor.training.checkpoints.saving import Checkpoints, StopSignal, restore
from torch_thor.training.checkpoints.weights import load_weights, with_checksum
from torch_thor.training.config.recipe import Recipe
from torch_thor.training.config.stored_recipe import stored_text
from torch_thor.training.data.named import open_data
from torch_thor.training.data.stream import DataSet
from torch_thor.training.engine import parallel
from torch_thor.training.engine.averaging import averaged
from torch_thor.training.engine.loop import Callback, Run, train
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.errors import require, writing
from torch_thor.training.files import write_whole
from torch_thor.training.models.classifiers import build_model, check_fits, check_head
from torch_thor.training.optimizers.registry import build_optimizer
from torch_thor.training.printing import printer
from torch_thor.training.reports.refresh_plot import draw_refreshes
from torch_thor.training.reports.summary import (
    Summary,
    as_json,
    draw_curves,
    refresh_table,
    refreshed_layers,
    summary_table,
)


def run_recipe(
    recipe: Recipe,
    out: Path,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
) -> list[Summary]:
    """Train a recipe's optimizers one after the other and write the run folder.

    Args:
        recipe: The recipe.
        out: The run folder.
        console: Where the bar and the table go.
        resume: Go on with the run in `out`.
        overwrite: Throw away the run in `out`.
        profile: Profile a few steps of each optimizer.

    Returns:
        One summary for each optimizer.
    """
    device = resolve_device(recipe.device)
    folder = RunFolder(out)
    with parallel.processes(device), parallel.threads(recipe.threads), folder.lock() as lock:
        say = parallel.rank_zero_print(printer(console))
        with parallel.agreed():
            recipe = with_checksum(recipe)
            if parallel.is_first() and folder.is_run():
                lock.take()
            folder.check(recipe, resume=resume, overwrite=overwrite, say=say)
            data = open_data(recipe.data, device, say, printer(console))
        with parallel.agreed():  # not with the above: to make a run is to communicate
            new_run(
                recipe, recipe.optimizer[0], data, resumed=resume
            )  # a recipe that cannot start must not touch the folder
        with parallel.agreed():
            if parallel.is_first():
                folder.claim(recipe, lock, resume=resume, overwrite=overwrite)
        # the bars are drawn over and over: into a file they would be no use
        hidden = not (parallel.is_first() and console.is_interactive)
        with StopSignal().listening() as stop, Display(console=console, disable=hidden) as display:
            tasks = {name: display.add_run(name) for name in recipe.optimizer}
            summaries = [
                _train_one(
                    recipe,
                    name,
                    data,
                    folder,
                    Lines(display, name, recipe.log_interval) if hidden else Bar(display, task),
                    stop,
                    parallel.rank_zero_print(printer(display.console)),
                    Profiler(folder.profile(name), display.console) if profile else None,
                )
                for name, task in tasks.items()
            ]
        if parallel.is_first():
            _report(recipe, folder, summaries, console)
    return summaries


def new_run(recipe: Recipe, optimizer: str, data: DataSet, *, resumed: bool = False) -> Run:
    """A run of one optimizer, before its first step.

    Args:
        recipe: The recipe.
        optimizer: Which of its optimizers.
        data: The data, for the device to train on.
        resumed: Whether its weights come from a checkpoint later, so that those it started from need not be there.

    Returns:
        The run; its weights are a function of the recipe's seed, or those that the recipe names.
    """
    outputs = recipe.classes or data.classes
    check_head(outputs, data.classes)
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model, data.image_shape[0], outputs)
    if recipe.weights is not None and not resumed:
        load_weights(model, recipe)
    # convolutions are faster in channels_last, on a CPU too, and for every optimizer alike
    model = model.to(data.device).to(memory_format=torch.channels_last)
    check_fits(recipe.model, model, data.image_shape, outputs)
    average = averaged(model, recipe.ema_decay)
    built = build_optimizer(optimizer, model, recipe.optimizers[optimizer])
    if rank := parallel.shard().rank:
        torch.manual_seed(recipe.seed + rank)  # the same weights, but not the same dropout
    return Run(model, built, data, recipe, average, outputs)


def _train_one(
    recipe: Recipe,
    name: str,
    data: DataSet,
    folder: RunFolder,
    progress: Callback,
    stop: StopSignal,
    say: Callable[[str], None],
    profiler: Profiler | None,
) -> Summary:
    with parallel.agreed():
        saved = checkpoint.newest_whole(folder.checkpoints(name), say)
        run = new_run(recipe, name, data, resumed=saved is not None)
        if saved is not None:
            require(
                saved.optimizer == name,
                f"checkpoint {saved.path} is of optimizer {saved.optimizer}, not {name}: put it back where it belongs",
            )
            restore(run, saved, folder.metrics(name), say)
            say(f"{name}: goes on from step {run.step} of {run.total_steps}")
    with writing(folder.metrics(name)):
        folder.metrics(name).parent.mkdir(exist_ok=True)
    metrics = MetricsFile(folder.metrics(name))
    tensorboard = TensorBoard(folder.tensorboard(name), recipe.log_interval)
    checkpoints = Checkpoints(
        folder.checkpoints(name),
        metrics,
        stop,
        interval=recipe.checkpoint_interval,
        keep=recipe.keep_checkpoints,
        optimizer=name,
        recipe=stored_text(recipe),
        keep_best=recipe.keep_best,
    )
    callbacks: list[Callback] = [checkpoints]
    with ExitStack() as closed:
        if parallel.is_first():
            closed.enter_context(closing(metrics))
            closed.enter_context(closing(tensorboard))
            callbacks = [metrics, tensorboard, progress, checkpoints]
            if profiler is not None:
                closed.enter_context(closing(profiler))
                callbacks.append(profiler)
        record = train(run, callbacks)
    return Summary(name, record, refreshed_layers(run.optimizer, record), recipe.stop_at)


def _report(recipe: Recipe, folder: RunFolder, summaries: list[Summary], console: Console) -> None:
    targets = sorted({*recipe.targets, *([recipe.stop_at] if recipe.stop_at else [])})
    with writing(folder.path / CURVES_FILE):
        draw_curves(summaries, folder.path / CURVES_FILE)
    results = [as_json(summary, targets) for summary in summaries]
    write_whole(folder.path / SUMMARY_FILE, json.dumps(results, indent=2) + "\n")
    for summary in summaries:
        if summary.refreshed:
            layers = [layer.layer for layer in summary.refreshed]
            with writing(folder.refreshes(summary.name)):
                draw_refreshes(summary.record, layers, folder.refreshes(summary.name))
            console.print(refresh_table(summary))
    console.print(summary_table(summaries, targets))
    printer(console)(f"Curves, metrics, recipe and checkpoints are in {folder.path}")
