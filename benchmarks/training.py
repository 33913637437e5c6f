"""One training of a problem by an optimizer, which all studies share, and the times of steps.

A job names its `task` (problems.py), its `optimizer` (optimizers.py) and its `seed`. `schedule`
replaces the problem's own (schedule-free AdamW's rate stays), `half` says which half of the
held-out data is read (otherwise the first with a seed that chooses, the second with a reported
seed), and every other key is an option of the optimizer. Learning rates grow over the first 5 % of
the steps.
"""

import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.optimizers import WITHOUT_SCHEDULE, is_ours, make
from benchmarks.problems import PROBLEMS, Batch, Problem
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.numbers import apart
from benchmarks.runner.stores import key_of
from benchmarks.runner.timing import RATE, time_optimizers

TUNING_SEEDS, SEEDS = (10, 11, 12), (0, 1, 2)
WARM_UP = 0.05  # of the steps
HIGHEST_LOSS = 1e5  # a run whose loss exceeds it, or is no number, has diverged
BATCHES = 20  # for the statistics of BatchNorm
WORDS = ("task", "optimizer", "seed", "schedule", "half")  # of a job; the rest are options

Job = dict[str, Any]
Rows = Mapping[str, Mapping[str, Any]]


# ---- one run -------------------------------------------------------------------------------------


def run(job: Job) -> dict[str, Any]:
    """Train, or time steps: the figure at the end, and a curve of (step, figure, refreshes)."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if job.get("alone"):
        return time_steps(job)
    problem, tuning = PROBLEMS[job["task"]], job["seed"] in TUNING_SEEDS
    half = job.get("half", int(not tuning))
    torch.manual_seed(job["seed"])
    model = problem.model().train()
    optimizer = make(job["optimizer"], model, **options_of(job))
    usual = "constant" if job["optimizer"] in WITHOUT_SCHEDULE else problem.schedule
    kind = job.get("schedule", usual)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: share_of_lr(step, problem.steps, kind)
    )
    batches = problem.batches(problem.batch, job["seed"])
    losses, curve, refreshes, seconds = list[float](), list[Any](), 0, 0.0
    for step in range(1, problem.steps + 1):
        batch, started = next(batches), time.perf_counter()
        losses.append(take_step(problem, model, optimizer, batch))
        schedule.step()
        seconds += time.perf_counter() - started
        refreshes += bool(getattr(optimizer, "last_refresh", ()))
        if not losses[-1] <= HIGHEST_LOSS:
            return {"value": None, "failure": f"loss {losses[-1]} in step {step}"}
        evaluated = not tuning and step % max(1, problem.steps // problem.evaluations) == 0
        if evaluated or step == problem.steps:
            curve.append((step, evaluate(problem, model, optimizer, batches, half), refreshes))
    mean_loss = statistics.fmean(losses[-max(1, problem.steps // 20) :])
    found = {"value": curve[-1][1], "loss": mean_loss, "seconds": round(seconds, 2)}
    if averages(optimizer):
        found |= without_a_mode(problem, model, optimizer, half)
    return found if tuning else {**found, "curve": curve}


def options_of(job: Job) -> dict[str, Any]:
    """Return the options of a job's optimizer."""
    return {key: value for key, value in job.items() if key not in WORDS}


def take_step(
    problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> float:
    """Train on a batch, and return the loss."""
    loss = problem.loss(model, batch)
    loss.backward()
    problem.prepare(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


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


# ---- figures -------------------------------------------------------------------------------------


def averages(optimizer: Any) -> bool:
    """Return whether an optimizer has an average of its steps, which `eval` shows."""
    return bool(getattr(optimizer, "anytime", hasattr(optimizer, "eval")))


@torch.no_grad()
def figure(problem: Problem, model: nn.Module, half: int) -> float:
    """Return the problem's figure on half of the held-out data."""
    model.eval()
    found = torch.cat([problem.score(model, batch) for batch in problem.held_out(half)])
    model.train()
    return found.mean().item()


def evaluate(
    problem: Problem, model: nn.Module, optimizer: Any, batches: Iterator[Batch], half: int
) -> float:
    """Return the figure, at the average of the steps where the optimizer averages."""
    if not averages(optimizer):
        return figure(problem, model, half)
    optimizer.eval()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [{key: value.clone() for key, value in norm.state_dict().items()} for norm in norms]
    momenta = [norm.momentum for norm in norms]
    take_statistics(problem, model, norms, batches)
    found = figure(problem, model, half)
    for norm, state, momentum in zip(norms, kept, momenta, strict=True):
        norm.load_state_dict(state)
        norm.momentum = momentum
    optimizer.train()
    return found


@torch.no_grad()
def take_statistics(
    problem: Problem, model: nn.Module, norms: Sequence[_BatchNorm], batches: Iterator[Batch]
) -> None:
    """Take the statistics of BatchNorm anew, as the README of schedule_free asks."""
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean of all batches
    for _ in range(BATCHES if norms else 0):
        problem.loss(model, next(batches))


def without_a_mode(problem: Problem, model: nn.Module, optimizer: Any, half: int) -> dict[str, Any]:
    """Return the figures of the weights as they are, and of the average with old statistics."""
    found = {"as it is": figure(problem, model, half)}
    optimizer.eval()
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        found["kept statistics"] = figure(problem, model, half)
    optimizer.train()
    return found


def time_steps(job: Job) -> dict[str, Any]:
    """Time the steps of the optimizers of a job's `settings` in turns."""
    problem = PROBLEMS[job["task"]]
    batches = problem.batches(problem.batch, 0)

    def made(setting: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = problem.model().train()
        return model, make(setting["optimizer"], model, **{**options_of(setting), "lr": RATE})

    makers = {name: partial(made, setting) for name, setting in job["settings"].items()}
    return time_optimizers(makers, partial(take_step, problem), lambda: next(batches), 3)


def optimizers(job: Job) -> list[str]:
    """Name our classes that a job trains with or times."""
    settings = job.get("settings", {job.get("optimizer"): job})
    names = {name for own in settings.values() for name in is_ours(own.get("optimizer"))}
    pretrained = {"ThorMuon"} if job["task"].endswith("-thor-muon") else set()
    return sorted(names | pretrained)


# ---- lists and tables ----------------------------------------------------------------------------


def tolerance(rows: Rows, job: Job) -> float:
    """Return how far a value may differ on another machine: as two seeds may."""
    return apart([rows[key_of({**job, "seed": seed})]["value"] for seed in SEEDS])


def confirm(setting: Job, seeds: Sequence[int] = SEEDS) -> list[Job]:
    """Return the runs of a setting with the seeds that are reported."""
    return [{**setting, "seed": seed} for seed in seeds]


def values(rows: Rows, setting: Job, seeds: Sequence[int] = SEEDS, key: str = "value") -> list[Any]:
    """Return the figures of a setting; none if a seed is missing or diverged."""
    found = [rows.get(key_of(job), {}).get(key) for job in confirm(setting, seeds)]
    return [] if None in found else found


def cell(rows: Rows, setting: Job, key: str = "value") -> str:
    """Return the mean of a setting and its standard error."""
    found = values(rows, setting, key=key)
    return with_error(found) if found else "–"


def compare(rows: Rows, settings: Mapping[str, Mapping[str, Job]], head: str) -> str:
    """Return a table with a line for each name, and a column for each problem of its settings."""
    tasks = list(dict.fromkeys(task for own in settings.values() for task in own))
    lines = [
        [name, *(cell(rows, own[task]) if task in own else "–" for task in tasks)]
        for name, own in settings.items()
    ]
    return markdown([head, *tasks], lines)
