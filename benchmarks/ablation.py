"""What ThorMuon's parts give: A, exact polar factors, momentum, the length of a step.

    python -m benchmarks ablation            # runs what is missing: four hours of a core
    python -m benchmarks ablation --table

The problems are nanoGPT's CPU example and three of the suite that chose no default in use here.
ThorMuon has a weight decay of 0.01 and no other option than those that its name says. Muon is
tuned: in the suite over learning rates and two momenta, on nanoGPT's example over five learning
rates with each momentum (rows of other studies are read from there). Newton-Muon (arXiv 2604.01472)
has five learning rates with its momentum of 0.95, and in the suite five with 0.8. Seed 10 chooses,
in the suite by the half of the held-out data that is not reported.
"""

from functools import cache
from typing import Any

from benchmarks import suite
from benchmarks.optimizers import CONTENDERS
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.stores import Lines, key_of
from benchmarks.runner.study import RESULTS
from benchmarks.runner.trials import best_of, rates_around, shown
from benchmarks.training import TUNING_SEEDS, Job, Rows, compare, confirm, optimizers, run

__all__ = ["jobs", "optimizers", "run", "table"]

TASKS = ("nanogpt", "vit", "lstm", "bert512")
WITH_LINEAR_LAYERS = ("nanogpt", "vit", "bert512")  # which Newton-Muon preconditions
TRIALS = 5
WITHOUT_A: Job = {"optimizer": "thor-muon", "curvature": False}
ARMS: dict[str, Job] = {
    "ThorMuon without A, polar factors by products, momentum 0.95": {
        **WITHOUT_A, "momentum": 0.95, "products": True,
    },
    "the same, exact polar factors": {**WITHOUT_A, "momentum": 0.95},
    "the same, momentum 0.8": WITHOUT_A,
    "the same, A in blocks of 128: ThorMuon": {"optimizer": "thor-muon"},
    "the same, A and polar factors of whole matrices": {
        "optimizer": "thor-muon", "split_dim": None,
    },
}  # fmt: skip
SLOWER: Job = {"optimizer": "muon", "momentum": 0.8}
NEWTON: Job = {"optimizer": "newton-muon"}
TUNED: dict[str, tuple[Job, tuple[str, ...]]] = {
    "Muon, tuned": ({"optimizer": "muon"}, ("nanogpt",)),
    "Muon, momentum 0.8, tuned": (SLOWER, ("nanogpt",)),
    "Newton-Muon, tuned": (NEWTON, WITH_LINEAR_LAYERS),
    "Newton-Muon, momentum 0.8, tuned": ({**NEWTON, "momentum": 0.8}, WITH_LINEAR_LAYERS[1:]),
}


@cache
def recorded() -> dict[str, Any]:
    """Return the rows of other studies."""
    return Lines(RESULTS / "suite.jsonl").rows | Lines(RESULTS / "nanogpt.jsonl").rows


def trials(rows: Rows, task: str, optimizer: Job) -> list[Job]:
    """Return the trials of a learning rate, as far as they are known."""
    setting: Job = {"task": task, "seed": TUNING_SEEDS[0], **optimizer}
    return rates_around(rows, setting, CONTENDERS["muon"].lr, count=TRIALS, higher=task == "vit")


def tuned(rows: Rows) -> dict[str, dict[str, Job]]:
    """Return the settings that trials have chosen, by their names and problems."""
    found: dict[str, dict[str, Job]] = {name: {} for name in TUNED}
    for name, (optimizer, tasks) in TUNED.items():
        for task in tasks:
            tried = trials(rows, task, optimizer)
            best = best_of(rows, tried, count=TRIALS, higher=task == "vit")
            if best is not None:
                found[name][task] = best
    of_suite = suite.chosen(recorded())
    found["Muon, tuned"] |= {task: of_suite[task, "muon"] for task in TASKS if task != "nanogpt"}
    return found


def jobs(rows: Rows) -> list[Job]:
    """List what this study runs; what others have run is left out."""
    known = recorded() | dict(rows)
    settings = [{"task": task, **arm} for task in TASKS for arm in ARMS.values()]
    settings += [setting for own in tuned(known).values() for setting in own.values()]
    found = [job for setting in settings for job in confirm(setting)]
    for optimizer, tasks in TUNED.values():
        found += [job for task in tasks for job in trials(known, task, optimizer)]
    return [job for job in found if key_of(job) not in recorded()]


def table(rows: Rows) -> str:
    """Return the figures of each form, and the trials of those that are tuned."""
    known = recorded() | dict(rows)
    settings = tuned(known) | {
        name: {task: {"task": task, **arm} for task in TASKS} for name, arm in ARMS.items()
    }
    tried = [
        [name, task, shown(known, trials(known, task, optimizer))]
        for name, (optimizer, tasks) in TUNED.items()
        for task in tasks
    ]
    heads = ["tuned", "problem", "learning rate: figure of the trial"]
    return f"{compare(known, settings, 'optimizer')}\n\n{markdown(heads, tried)}"
