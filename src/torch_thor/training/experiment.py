"""Running a recipe: training with each of its optimizers in turn, then the report."""

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
from rich.console import Console

from torch_thor.training.callbacks.metrics_file import MetricsFile
from torch_thor.training.callbacks.profiling import Profiler
from torch_thor.training.callbacks.progress import Bar, Display, Lines
from torch_thor.training.callbacks.tensorboard import TensorBoard
from torch_thor.training.checkpoints import checkpoint
from torch_thor.training.checkpoints.run_folder import RunFolder
from torch_thor.training.checkpoints.run_paths import CURVES_FILE, SUMMARY_FILE
from torch_thor.training.checkpoints.saving import Checkpoints, StopSignal, restore
from torch_thor.training.checkpoints.weights import load_weights, with_weights_checksum
from torch_thor.training.config.recipe import Recipe
from torch_thor.training.config.stored_recipe import stored_text
from torch_thor.training.data.stream import DataSet
from torch_thor.training.engine import parallel, sharding
from torch_thor.training.engine.averaging import averaged
from torch_thor.training.engine.job import Job
from torch_thor.training.engine.loop import Callback, Run, train
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.engine.starting import facts_of
from torch_thor.training.errors import require
from torch_thor.training.optimizers.registry import build_optimizer
from torch_thor.training.optimizers.split_dim import AUTO, with_split_dim
from torch_thor.training.output_files import write_whole, writing
from torch_thor.training.printing import printer
from torch_thor.training.reports.coverage_line import coverage_line
from torch_thor.training.reports.curves import draw_curves
from torch_thor.training.reports.refresh_plot import draw_refreshes
from torch_thor.training.reports.summary import (
    Summary,
    as_json,
    refresh_table,
    refreshed_layers,
    summary_table,
)
from torch_thor.training.tasks.image_classification import ImageClassification
from torch_thor.training.tasks.registry import TASKS
from torch_thor.training.tasks.task import Task


def run_recipe(
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
) -> list[Summary]:
    """Train with each optimizer of a recipe, one after the other, and write the run folder.

    Args:
        recipe: The recipe.
        folder: The run folder.
        console: Where progress and the final tables are printed.
        resume: Whether to continue the run in the folder.
        overwrite: Whether to delete the run in the folder.
        profile: Whether to profile a few steps of each optimizer.

    Returns:
        One summary for each optimizer.

    Raises:
        UserError: If the recipe cannot be run, or the folder may not be written to.
        StoppedError: If a signal stopped the training.
    """
    device = resolve_device(recipe.device)
    job = Job(folder.path, facts_of(recipe, **{"--resume": resume, "--overwrite": overwrite}))
    with (
        parallel.processes(device, job.join),
        parallel.threads(recipe.threads),
        folder.lock() as lock,
    ):
        say = parallel.rank_zero_print(printer(console))
        again = any(parallel.gathered(job.has_begun))
        with parallel.agreed():
            recipe = with_weights_checksum(recipe, say)
            if again and folder.is_run():
                resume, overwrite = True, False
                say(f"torchrun has started the processes again: the run in {folder.path} continues")
            if parallel.is_first() and folder.is_run():
                lock.take()
            folder.check(recipe, resume=resume, overwrite=overwrite, say=say)
            task = TASKS[recipe.task].open(recipe, device, say, printer(console))
        # the first run is built before the folder is changed: a recipe that cannot start must leave it as it was
        pending = {recipe.optimizer[0]: _begin(recipe, recipe.optimizer[0], task, folder, say, resume=resume)}
        with parallel.agreed():
            if parallel.is_first():
                if not folder.is_run():
                    job.begin()  # before the folder is changed: from here on, a run in it is that of this job
                folder.claim(recipe, lock, resume=resume, overwrite=overwrite)
                job.begin()
        # progress bars are redrawn in place, which only a terminal can show
        hidden = not (parallel.is_first() and console.is_interactive)
        with StopSignal().listening() as stop, Display(console=console, disable=hidden) as display:
            bars = {name: display.add_run(name) for name in recipe.optimizer}
            say = parallel.rank_zero_print(printer(display.console))
            summaries = []
            for name, bar in bars.items():
                # no other reference is kept, so that a finished run is freed before the next one is built
                begun = pending.pop(name, None) or _begin(recipe, name, task, folder, say, resume=resume)
                progress = Lines(display, name, recipe.log_interval) if hidden else Bar(display, bar)
                profiler = Profiler(folder.profile(name), display.console) if profile else None
                summaries.append(_train_one(begun, recipe, name, folder, progress, stop, say, profiler))
                del begun
        if parallel.is_first():
            _report(recipe, folder, summaries, console)
    return summaries


def new_run(recipe: Recipe, optimizer: str, task: Task, *, resumed: bool = False) -> Run:
    """Build a run of one optimizer, before its first step.

    Args:
        recipe: The recipe.
        optimizer: The name of one of its optimizers.
        task: The recipe's task, with its data.
        resumed: Whether a checkpoint will be loaded. The file of `weights` is then not needed.

    Returns:
        The run. Its weights depend only on the recipe's seed, or are those of `weights`.
    """
    torch.manual_seed(recipe.seed)
    model = task.build_model()
    if recipe.weights is not None and not resumed:
        load_weights(model, recipe, task)
    # a network that is divided is moved by parts, because the whole may be too large for the device
    model = model if recipe.parallel != "ddp" and parallel.shard().world_size > 1 else model.to(task.device)
    average = averaged(model, recipe.ema_decay)
    sharding.divide([model] if average is None else [model, average.module], recipe, task.device)
    settings = with_split_dim(recipe.optimizers[optimizer], model, task, recipe, resumed=resumed)
    built = build_optimizer(optimizer, model, settings)
    if rank := parallel.shard().rank:
        torch.manual_seed(recipe.seed + rank)  # the same weights, but not the same dropout
    return Run(model, built, task, recipe, average)


def image_run(recipe: Recipe, optimizer: str, data: DataSet) -> Run:
    """Build a run of one optimizer on images that are open already, before its first step.

    Args:
        recipe: A recipe of image classification.
        optimizer: The name of one of its optimizers.
        data: The images.

    Returns:
        The run.

    Raises:
        UserError: If the recipe has another task.
    """
    require(
        recipe.task == "image-classification",
        f"task={recipe.task} does not use labelled images: use a recipe with task=image-classification",
    )
    return new_run(recipe, optimizer, ImageClassification(data, recipe, model=recipe.model, outputs=recipe.classes))


@dataclass
class _PendingRun:
    """A run that is ready to train, and the checkpoint that it continues from, if any."""

    run: Run
    saved: checkpoint.Checkpoint | None


def _begin(
    recipe: Recipe, name: str, task: Task, folder: RunFolder, say: Callable[[str], None], *, resume: bool
) -> _PendingRun:
    with parallel.agreed():
        saved = checkpoint.newest_whole(folder.checkpoints(name), say) if resume else None
        if saved is not None:
            require(
                saved.optimizer == name,
                f"checkpoint {saved.path} belongs to optimizer {saved.optimizer}, not {name}: move it to the folder of "
                f"{saved.optimizer}",
            )
        return _PendingRun(new_run(recipe, name, task, resumed=saved is not None), saved)


def _train_one(
    begun: _PendingRun,
    recipe: Recipe,
    name: str,
    folder: RunFolder,
    progress: Callback,
    stop: StopSignal,
    say: Callable[[str], None],
    profiler: Profiler | None,
) -> Summary:
    run, task = begun.run, begun.run.task
    if begun.saved is not None:
        with parallel.agreed():
            restore(run, begun.saved, folder.metrics(name), say)
            say(f"{name}: continues from step {run.step} of {run.total_steps}")
    if line := coverage_line(run.optimizer):
        say(f"{name}: {line}")
    if getattr(recipe.optimizers[name], "split_dim", None) == AUTO:
        say(f"{name}: split_dim={run.optimizer.param_groups[0]['split_dim']} was measured for this network and device")
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
    refreshed = refreshed_layers(run.optimizer, record)
    return Summary(name, record, refreshed, task.metrics(), task.unit, recipe.stop_at)


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
