"""One training of a problem by an optimizer, which all studies of this folder share.

A job names its `task` (problems.py), its `optimizer` (optimizers.py) and its `seed`; `schedule`
replaces the problem's own, `half` says which half of the held-out data is read (otherwise 0 with
a seed that chooses, 1 with one that is reported), and every other key is an option of the
optimizer. Learning rates grow over the first 5 % of the steps.
"""

import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.optimizers import is_ours, make
from benchmarks.problems import PROBLEMS
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.stores import key_of
from benchmarks.suite_problems import Batch, Problem

TUNING_SEED, SEEDS = 10, (0, 1, 2)
WARM_UP = 0.05  # of the steps
EVALUATIONS = 16
HIGHEST_LOSS = 1e5  # a run whose loss exceeds it, or is no number, has diverged
BATCHES = 20  # for the statistics of BatchNorm
WORDS = ("task", "optimizer", "seed", "schedule", "half")  # of a job; the rest are options

Job = dict[str, Any]
Rows = Mapping[str, Mapping[str, Any]]


def run(job: Job) -> dict[str, Any]:
    """Train once: the figure at the end, a curve of (step, figure, refreshes so far), seconds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problem = PROBLEMS[job["task"]]
    tuning = job["seed"] == TUNING_SEED
    half = job.get("half", int(not tuning))
    torch.manual_seed(job["seed"])
    model = problem.model().train()
    options = {key: value for key, value in job.items() if key not in WORDS}
    optimizer = make(job["optimizer"], model, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: share_of_lr(step, problem.steps, job.get("schedule", problem.schedule)),
    )
    batches = problem.batches(problem.batch, job["seed"])
    losses, curve, refreshes, seconds = list[float](), list[Any](), 0, 0.0
    for step in range(1, problem.steps + 1):
        batch, started = next(batches), time.perf_counter()
        loss = problem.loss(model, batch)
        loss.backward()
        problem.prepare(model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        seconds += time.perf_counter() - started
        refreshes += bool(getattr(optimizer, "last_refresh", ()))
        if not losses[-1] <= HIGHEST_LOSS:
            return {"value": None, "failure": f"loss {losses[-1]} in step {step}"}
        evaluated = not tuning and step % max(1, problem.steps // EVALUATIONS) == 0
        if evaluated or step == problem.steps:
            curve.append((step, evaluate(problem, model, optimizer, batches, half), refreshes))
    mean_loss = statistics.fmean(losses[-max(1, problem.steps // 20) :])
    return {"value": curve[-1][1], "loss": mean_loss, "curve": curve, "seconds": round(seconds, 2)}


def share_of_lr(step: int, steps: int, schedule: str) -> float:
    """Return the learning rate of a step, from 0, as a share of the highest."""
    grown = min(1.0, (step + 1) / (WARM_UP * steps))
    if schedule == "nanogpt":  # of its train.py: a cosine that ends at a tenth
        warm_up = int(WARM_UP * steps)
        done = min(1.0, max(0, step - warm_up) / (steps - warm_up))
        return min((step + 1) / (warm_up + 1), 0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))
    fallen = {
        "constant": 1.0,
        "linear": (steps - step) / ((1 - WARM_UP) * steps),
        "cosine": (1 + math.cos(math.pi * step / steps)) / 2,
    }[schedule]
    return grown * min(1.0, fallen)


@torch.no_grad()
def evaluate(
    problem: Problem,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    half: int,
) -> float:
    """Return the problem's figure on half of the held-out data, of the average if there is one."""
    averages = bool(getattr(optimizer, "anytime", hasattr(optimizer, "eval")))
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if averages:
        optimizer.eval()  # type: ignore[attr-defined]
    kept = [(norm.running_mean.clone(), norm.running_var.clone(), norm.momentum) for norm in norms]  # type: ignore[union-attr]
    if averages and norms:
        take_statistics(problem, model, norms, batches)
    model.eval()
    figure = torch.cat([problem.score(model, batch) for batch in problem.held_out(half)])
    model.train()
    if averages:
        optimizer.train()  # type: ignore[attr-defined]
        for norm, (mean, var, momentum) in zip(norms, kept, strict=True):
            norm.running_mean.copy_(mean)  # type: ignore[union-attr]
            norm.running_var.copy_(var)  # type: ignore[union-attr]
            norm.momentum = momentum
    return figure.mean().item()


def take_statistics(
    problem: Problem, model: nn.Module, norms: Sequence[_BatchNorm], batches: Iterator[Batch]
) -> None:
    """Take the statistics of BatchNorm anew, as the README of schedule_free asks."""
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean of all batches
    for _ in range(BATCHES):
        problem.loss(model, next(batches))


def optimizers(job: Job) -> list[str]:
    """Name our class, if it trains."""
    return is_ours(job["optimizer"])


def confirm(setting: Job, seeds: Sequence[int] = SEEDS) -> list[Job]:
    """Return the runs of a setting with the seeds that are reported."""
    return [{**setting, "seed": seed} for seed in seeds]


def values(rows: Rows, setting: Job, seeds: Sequence[int] = SEEDS) -> list[float]:
    """Return the figures of a setting; none if a seed is missing or diverged."""
    found = [rows.get(key_of(job), {}).get("value") for job in confirm(setting, seeds)]
    return [value for value in found if value is not None] if None not in found else []


def cell(rows: Rows, setting: Job) -> str:
    """Return the mean of a setting and its standard error."""
    found = values(rows, setting)
    return with_error(found) if found else "–"


def compare(rows: Rows, settings: Mapping[str, Mapping[str, Job]], head: str) -> str:
    """Return a table with a line for each name, and a column for each problem of its settings."""
    tasks = list(dict.fromkeys(task for own in settings.values() for task in own))
    lines = [
        [name, *(cell(rows, own[task]) if task in own else "–" for task in tasks)]
        for name, own in settings.items()
    ]
    return markdown([head, *tasks], lines)
