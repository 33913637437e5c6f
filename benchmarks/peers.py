"""Muon and SOAP in the fine-tuning of MiniLM, each with five learning rates.

    python -m benchmarks peers            # runs what is missing (four hours of a core), then tables
    python -m benchmarks peers --table

Problems, seeds and halves are those of finetuning.py, in which AdamW and ThorMuon are trained.
"""

from benchmarks import finetuning
from benchmarks.optimizers import CONTENDERS
from benchmarks.problems import PROBLEMS
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.trials import best_of, rates_around, shown
from benchmarks.training import (
    TUNING_SEEDS,
    Job,
    Rows,
    compare,
    confirm,
    optimizers,
    run,
    tolerance,
)

__all__ = ["headlines", "jobs", "optimizers", "run", "table", "tolerance"]

TASKS = tuple(task for task in PROBLEMS if task.startswith("minilm"))
NAMES = {"muon": "Muon, tuned", "soap": "SOAP, tuned"}
FULL = 0.1  # of the rate from scratch, in the first three trials where all weights are trained
TRIALS = 5


def trials(rows: Rows, task: str, name: str) -> list[Job]:
    """Return the trials of a learning rate, as far as they are known."""
    setting = {"task": task, "optimizer": name, "seed": TUNING_SEEDS[0]}
    middle = CONTENDERS[name].lr * (1.0 if "lora" in task else FULL)
    return rates_around(rows, setting, middle, count=TRIALS, higher=True)


def chosen(rows: Rows, task: str, name: str) -> Job | None:
    """Return the best setting, once all trials are there."""
    return best_of(rows, trials(rows, task, name), count=TRIALS, higher=True)


def jobs(rows: Rows) -> list[Job]:
    """List the jobs that are known."""
    pairs = [(task, name) for task in TASKS for name in NAMES]
    found = [job for pair in pairs for job in trials(rows, *pair)]
    best = [chosen(rows, *pair) for pair in pairs]
    return found + [job for setting in best if setting is not None for job in confirm(setting)]


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of Muon on each problem whose row README shows."""
    best = [chosen(rows, task, "muon") for task in finetuning.README]
    return [{**setting, "seed": 0} for setting in best if setting is not None]


def table(rows: Rows) -> str:
    """Return the figures with the chosen rates, and the trials."""
    settings = {
        title: {t: job for t in TASKS if (job := chosen(rows, t, name)) is not None}
        for name, title in NAMES.items()
    }
    tried = [
        [title, task, shown(rows, trials(rows, task, name))]
        for name, title in NAMES.items()
        for task in TASKS
    ]
    heads = ["tuned", "problem", "learning rate: accuracy of the trial"]
    return f"{compare(rows, settings, 'optimizer')}\n\n{markdown(heads, tried)}"
