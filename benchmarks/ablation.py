"""What the parts of ThorMuon's step give: A, exact polar factors, momentum, the length of a step.

    python -m benchmarks ablation            # runs what is missing: four hours of a core
    python -m benchmarks ablation --table

The problems are nanoGPT's CPU example and three of the suite that chose no default. ThorMuon has a
weight decay of 0.01 and no other option than those that its name says. Muon is tuned: in the suite
over learning rates and two momenta (its rows are read from there), on nanoGPT's example over five
learning rates with each momentum. Newton-Muon (arXiv 2604.01472) has five learning rates too. Seed
10, and the half of the held-out data that is not reported, choose them.
"""

from functools import cache
from typing import Any

from benchmarks import suite
from benchmarks.optimizers import is_ours
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.stores import Lines, key_of
from benchmarks.runner.study import RESULTS
from benchmarks.runner.trials import best_of, rates_around, shown
from benchmarks.suite_optimizers import CONTENDERS
from benchmarks.training import TUNING_SEED, Job, Rows, compare, confirm, run

__all__ = ["jobs", "optimizers", "run", "table"]

TASKS = ("nanogpt", "vit", "lstm", "bert512")
WITH_LINEAR_LAYERS = ("nanogpt", "vit", "bert512")  # which Newton-Muon preconditions
MOMENTA = (0.95, 0.8)  # of Muon
TRIALS = 5
ARMS: dict[str, Job] = {
    "ThorMuon without A, polar factors by products, momentum 0.95": {
        "optimizer": "thor-muon by products", "curvature": False, "momentum": 0.95,
    },
    "the same, exact polar factors": {
        "optimizer": "thor-muon", "curvature": False, "momentum": 0.95,
    },
    "the same, momentum 0.8": {"optimizer": "thor-muon", "curvature": False},
    "the same, A in blocks of 128: ThorMuon": {"optimizer": "thor-muon"},
    "the same, A in full": {"optimizer": "thor-muon", "split_dim": None},
}  # fmt: skip


@cache
def recorded() -> dict[str, Any]:
    """Return the rows of Muon that other studies have."""
    of_suite = Lines(RESULTS / "suite.jsonl").rows
    of_gpt = Lines(RESULTS / "nanogpt.jsonl").rows.values()
    muon = [row for row in of_gpt if row["job"].get("optimizer") == "muon"]
    named = [{**row, "job": {"task": "nanogpt", **row["job"]}} for row in muon]
    return of_suite | {key_of(row["job"]): row for row in named}


def trials(rows: Rows, task: str, optimizer: str, momentum: float) -> list[Job]:
    """Return the trials of a learning rate, as far as they are known."""
    setting: Job = {"task": task, "optimizer": optimizer, "seed": TUNING_SEED}
    if momentum != MOMENTA[0]:
        setting["momentum"] = momentum
    middle = CONTENDERS["muon"].lr
    return rates_around(rows, setting, middle, count=TRIALS, higher=task == "vit")


def tuned(rows: Rows) -> dict[str, dict[str, Job]]:
    """Return the settings that trials have chosen, by their names and problems."""
    found: dict[str, dict[str, Job]] = {"Muon, tuned": {}, "Muon, tuned, momentum 0.8": {}}
    best = suite.chosen(recorded())
    found["Muon, tuned"] = {task: best[task, "muon"] for task in TASKS if task != "nanogpt"}
    wanted = [("Muon, tuned", "nanogpt", "muon", MOMENTA[0])]
    wanted += [("Muon, tuned, momentum 0.8", "nanogpt", "muon", MOMENTA[1])]
    wanted += [("Newton-Muon, tuned", t, "newton-muon", MOMENTA[0]) for t in WITH_LINEAR_LAYERS]
    for name, task, optimizer, momentum in wanted:
        tried = trials(rows, task, optimizer, momentum)
        setting = best_of(rows, tried, count=TRIALS, higher=task == "vit")
        if setting is not None:
            found.setdefault(name, {})[task] = setting
    return found


def jobs(rows: Rows) -> list[Job]:
    """List what this study runs; what others have run is left out."""
    known = recorded() | dict(rows)
    settings = [{"task": task, **arm} for task in TASKS for arm in ARMS.values()]
    found = [job for setting in settings for job in confirm(setting)]
    found += trials(known, "nanogpt", "muon", MOMENTA[1])
    found += [
        job for task in WITH_LINEAR_LAYERS for job in trials(known, task, "newton-muon", MOMENTA[0])
    ]
    found += [
        job for own in tuned(known).values() for setting in own.values() for job in confirm(setting)
    ]
    return [job for job in found if key_of(job) not in recorded()]


def optimizers(job: Job) -> list[str]:
    """Name our class, if it trains."""
    return is_ours(job["optimizer"])


def table(rows: Rows) -> str:
    """Return the figures of each form, and the trials of those that are tuned."""
    known = recorded() | dict(rows)
    settings = tuned(known) | {
        name: {task: {"task": task, **arm} for task in TASKS} for name, arm in ARMS.items()
    }
    tried = [
        [name, task, shown(known, trials(known, task, optimizer, momentum))]
        for name, optimizer, momentum, tasks in (
            ("Muon, momentum 0.95", "muon", MOMENTA[0], TASKS[:1]),
            ("Muon, momentum 0.8", "muon", MOMENTA[1], TASKS[:1]),
            ("Newton-Muon", "newton-muon", MOMENTA[0], WITH_LINEAR_LAYERS),
        )
        for task in tasks
    ]
    heads = ["tuned", "problem", "learning rate: figure of the trial"]
    return f"{compare(known, settings, 'optimizer')}\n\n{markdown(heads, tried)}"
