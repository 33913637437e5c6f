"""Without a schedule: ThorMuon(anytime=True) and others that ask for no rate, on the suite.

    python -m benchmarks anytime            # runs what is missing, then the table
    python -m benchmarks anytime --table

Problems, batches and held-out data are those of suite_problems.py; the half that chose nothing is
reported, for three seeds. Learning rates grow over the first 5 % of the steps. Then they stay for
ThorMuon with `anytime`, schedule-free AdamW (0.0025 and the betas of its README), Prodigy and
D-Adaptation (DAdaptAdam), which have no option. With them stand ThorMuon with its schedule, and
AdamW as tuned for each problem in the suite, whose rates fall linearly to 0, and Prodigy and
D-Adaptation under the cosine that Prodigy's README recommends.

Beside them stand nanoGPT's CPU example (nanogpt.py), whose rates grow over 100 steps and then stay,
or fall along its cosine, and the fine-tuning of MiniLM (finetuning_problems.py).

An optimizer with `eval` and `train` is evaluated after `eval`. The statistics of BatchNorm are then
taken anew from 20 batches, as the README of schedule_free asks; the figure with those of the
training stands beside it. For ThorMuon so does the figure of the parameters as they are, without a
mode.
"""

import math
import statistics
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks import finetuning_problems, nanogpt, suite
from benchmarks.gpu_nanogpt import share
from benchmarks.runner.markdown import number, with_error
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.stores import Lines, key_of
from benchmarks.suite_optimizers import CONTENDERS, as_one_matrix
from benchmarks.suite_problems import PROBLEMS, Batch, Problem
from torch_thor import ThorMuon

SEEDS = (0, 1, 2)
BATCHES = 20  # for the statistics of BatchNorm
# schedules by the names of contestants
NAMES = {
    "thor-muon": "linear",
    "anytime": "constant",
    "adamw": "linear",
    "schedule-free": "constant",
    "prodigy": "constant",
    "prodigy, cosine": "cosine",
    "d-adaptation": "constant",
    "d-adaptation, cosine": "cosine",
}
TITLES = {
    "thor-muon": "ThorMuon with its schedule",
    "anytime": "ThorMuon(anytime=True)",
    "as it is": "the same, without a mode",
    "adamw": "AdamW, tuned, with a schedule",
    "schedule-free": "schedule-free AdamW",
    "prodigy": "Prodigy",
    "prodigy, cosine": "Prodigy, cosine",
    "d-adaptation": "D-Adaptation",
    "d-adaptation, cosine": "D-Adaptation, cosine",
}
# problems beside those of the suite, and who trains on them
FINE_TUNED = {name: finetuning_problems.PROBLEMS[name] for name in ("minilm-sst2", "minilm-trec")}
OTHERS = ("nanogpt", *FINE_TUNED)
ON_OTHERS = ("thor-muon", "anytime", "schedule-free", "prodigy", "prodigy, cosine")
Job = dict[str, Any]
Rows = dict[str, dict[str, Any]]


def make(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """Make the optimizer of a job."""
    name = job["name"].partition(",")[0]
    if name in ("thor-muon", "anytime"):
        return ThorMuon(
            model, weight_decay=0.01, row_splits=as_one_matrix(model), anytime=name == "anytime"
        )
    if name == "adamw":
        return CONTENDERS["adamw"].make(model, **job["options"])
    import pytorch_optimizer as others  # the extra `bench`

    kind: Any = {
        "schedule-free": others.ScheduleFreeAdamW,
        "prodigy": others.Prodigy,
        "d-adaptation": others.DAdaptAdam,
    }[name]
    optimizer: torch.optim.Optimizer = kind(model.parameters())
    return optimizer


def share_of_lr(step: int, steps: int, schedule: str) -> float:
    """Return the learning rate of a step, from 0, as a share of the highest."""
    fallen = {
        "constant": 1.0,
        "linear": (steps - step) / ((1 - suite.WARM_UP) * steps),
        "cosine": (1 + math.cos(math.pi * step / steps)) / 2,
    }[schedule]
    return min(1.0, (step + 1) / (suite.WARM_UP * steps)) * min(1.0, fallen)


def run(job: Job) -> dict[str, Any]:
    """Train once."""
    torch.set_num_threads(1)
    if job["task"] == "nanogpt":
        with redirect_stdout(None):  # nanoGPT prints its numbers of parameters
            return run_nanogpt(job)
    problem = (PROBLEMS | FINE_TUNED)[job["task"]]
    torch.manual_seed(job["seed"])
    model = problem.model().train()
    optimizer: Any = make(model, job)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: share_of_lr(step, problem.steps, NAMES[job["name"]])
    )
    batches = problem.batches(problem.batch, job["seed"])
    for step in range(problem.steps):
        loss = problem.loss(model, next(batches))
        loss.backward()
        problem.prepare(model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if not math.isfinite(loss.item()) or loss.item() > suite.HIGHEST_LOSS:
            return {"value": None, "failure": f"loss {loss.item()} in step {step}"}
    result = {"as it is": figure(problem, model)}
    if job["name"] in ("anytime", "schedule-free"):
        optimizer.eval()
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            result["kept statistics"] = figure(problem, model)
            take_statistics(problem, model, batches)
    return result | {"value": figure(problem, model)}


def run_nanogpt(job: Job) -> dict[str, Any]:
    """Train nanoGPT's example once."""
    own = nanogpt.example()
    torch.manual_seed(job["seed"])
    model = own.network()
    optimizer: Any = make(model, job)
    generator = torch.Generator().manual_seed(job["seed"])
    steps, warm_up = own.config["max_iters"], own.config["warmup_iters"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            share(step, own.config)
            if NAMES[job["name"]] != "constant"
            else min(1.0, (step + 1) / warm_up)
        ),
    )
    for _ in range(steps):
        nanogpt.take_step(own, model, optimizer, own.batch(own.train_text, generator))
        schedule.step()
    result = {"as it is": own.loss(model)}
    if job["name"] in ("anytime", "schedule-free"):
        optimizer.eval()
    return result | {"value": own.loss(model)}


@torch.no_grad()
def take_statistics(problem: Problem, model: nn.Module, batches: Iterator[Batch]) -> None:
    """Take the statistics of BatchNorm anew."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # the plain mean of all batches
    for _ in range(BATCHES):
        problem.loss(model, next(batches))


@torch.no_grad()
def figure(problem: Problem, model: nn.Module) -> float:
    """Return the problem's figure on the half of the held-out data that is reported."""
    model.eval()
    found = torch.cat([problem.score(model, batch) for batch in problem.held_out(1)])
    model.train()
    return found.mean().item()


def optimizers(job: Job) -> list[str]:
    """Name ours."""
    return ["ThorMuon"] if job["name"] in ("thor-muon", "anytime") else []


@cache
def _chosen() -> dict[tuple[str, str], Job]:
    rows = Lines(Path(__file__).with_name("results") / "suite.jsonl").rows
    return suite.chosen(rows)


def jobs(rows: Rows) -> list[Job]:
    """List all jobs."""
    found = []
    for name in NAMES:
        for task in PROBLEMS:
            given = {}
            if name == "adamw":
                best = _chosen()[task, "adamw"]
                given["options"] = {
                    key: value
                    for key, value in best.items()
                    if key not in ("task", "optimizer", "seed")
                }
            found += [{"task": task, "name": name, "seed": seed, **given} for seed in SEEDS]
    for name in ON_OTHERS:
        found += [{"task": task, "name": name, "seed": seed} for task in OTHERS for seed in SEEDS]
    return found


def table(rows: Rows) -> str:
    """Return each contestant's figures, and how far they are from ThorMuon's with its schedule."""
    own: dict[tuple[str, str], list[float]] = {}
    for job in jobs(rows):
        row = rows.get(key_of(job), {})
        kinds = {job["name"]: "value"}
        if job["name"] == "anytime":
            kinds |= {"as it is": "as it is", "kept": "kept statistics"}
        for name, key in kinds.items():
            if row.get(key) is not None:
                own.setdefault((job["task"], name), []).append(row[key])
    lines = [
        [task, *(with_error(own[task, n]) if (task, n) in own else "–" for n in TITLES)]
        for task in (*PROBLEMS, *OTHERS)
    ]
    figures = markdown(["problem", *TITLES.values()], lines)
    summary = []
    for name, title in TITLES.items():
        found = {t: v for t in PROBLEMS if (v := _excess(own, t, name)) is not None}
        if found:
            ahead = sum(_excess(own, t, "adamw") > v for t, v in found.items())  # type: ignore[operator]
            within = sum(v <= 0.02 for v in found.values())
            middle = number(100 * statistics.median(found.values()), ".1f")
            summary.append([title, f"{middle} %", f"{within} of {len(found)}", str(ahead)])
    heads = ["", "median excess", "within 2 %", "ahead of tuned AdamW"]
    statistics_of = [
        [task, *(with_error(own[task, name]) for name in ("anytime", "kept"))]
        for task in PROBLEMS
        if (task, "kept") in own
    ]
    norms = markdown(["problem", "new statistics of BatchNorm", "kept"], statistics_of)
    return f"{figures}\n\n{markdown(heads, summary)}\n\n{norms}"


def _excess(own: dict[tuple[str, str], list[float]], task: str, name: str) -> float | None:
    """Return the loss, or the share of errors, relative to that of ThorMuon with its schedule."""
    if (task, name) not in own or (task, "thor-muon") not in own:
        return None
    value, base = (statistics.fmean(own[task, key]) for key in (name, "thor-muon"))
    if PROBLEMS[task].higher:
        value, base = 1 - value, 1 - base
    return value / base - 1
