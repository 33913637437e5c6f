"""Without a schedule: ThorMuon(anytime=True) and others that ask for no rate, on the suite.

    python -m benchmarks anytime            # runs what is missing, then the table
    python -m benchmarks anytime --table

The half of the held-out data that chose nothing is reported, for three seeds (nanoGPT's example has
a single held-out text). Schedule-free AdamW has the rate 0.0025 and the betas of its README, AdamW
is tuned for each problem in the suite, and Prodigy and D-Adaptation (DAdaptAdam) run at a constant
rate and under the cosine that Prodigy's README recommends. nanoGPT's CPU example and the
fine-tuning of MiniLM are measured too.

An optimizer that averages is evaluated at its average, with statistics of BatchNorm that are taken
anew; the figures with those of the training, and of the weights as they are, stand beside it.
"""

import statistics
from functools import cache
from typing import Any

from benchmarks import suite
from benchmarks.runner.markdown import number, with_error
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.stores import Lines, key_of
from benchmarks.runner.study import RESULTS
from benchmarks.suite_problems import PROBLEMS
from benchmarks.training import Job, Rows, confirm, optimizers, run, values

__all__ = ["jobs", "optimizers", "run", "table"]

STAYS = {"schedule": "constant"}
TITLES: dict[str, Job] = {
    "ThorMuon with its schedule": {"optimizer": "thor-muon"},
    "ThorMuon(anytime=True)": {"optimizer": "thor-muon", "anytime": True, **STAYS},
    "the same, without a mode": {"optimizer": "thor-muon", "anytime": True, **STAYS},
    "AdamW, tuned, with a schedule": {"optimizer": "adamw"},
    "schedule-free AdamW": {"optimizer": "schedule-free at 0.0025", **STAYS},
    "Prodigy": {"optimizer": "prodigy", **STAYS},
    "Prodigy, cosine": {"optimizer": "prodigy", "schedule": "cosine"},
    "D-Adaptation": {"optimizer": "d-adaptation", **STAYS},
    "D-Adaptation, cosine": {"optimizer": "d-adaptation", "schedule": "cosine"},
}
SCHEDULED, ANYTIME, AS_IT_IS, ADAMW, FREE, PRODIGY, COSINE, D_ADAPTATION, _ = TITLES
OTHERS = {  # problems beside those of the suite, and who trains on them
    "nanogpt": (SCHEDULED, ANYTIME, FREE, PRODIGY, COSINE, D_ADAPTATION),
    "minilm-sst2": (SCHEDULED, ANYTIME),
}


@cache
def tuned() -> dict[tuple[str, str], Job]:
    """Return what the suite has chosen."""
    return suite.chosen(Lines(RESULTS / "suite.jsonl").rows)


def setting(title: str, task: str) -> Job:
    """Return the setting of a contestant on a problem."""
    if title == ADAMW:
        return tuned()[task, "adamw"]
    own = {"task": task, **TITLES[title]}
    if title == COSINE and task == "nanogpt":
        own["schedule"] = "nanogpt"
    return own


def jobs(rows: Rows) -> list[Job]:
    """List all jobs."""
    pairs = [(title, task) for title in TITLES if title != AS_IT_IS for task in PROBLEMS]
    pairs += [(title, task) for task, titles in OTHERS.items() for title in titles]
    return [job for pair in pairs for job in confirm(setting(*pair))]


def figures(rows: Rows, title: str, task: str) -> list[Any]:
    """Return the figures of a contestant on a problem; none where it was not run."""
    if task in OTHERS and title not in (*OTHERS[task], AS_IT_IS):
        return []
    return values(rows, setting(title, task), key="as it is" if title == AS_IT_IS else "value")


def table(rows: Rows) -> str:
    """Return each contestant's figures, and how far they are from ThorMuon's with its schedule."""
    lines = []
    for task in (*PROBLEMS, *OTHERS):
        found = [figures(rows, title, task) for title in TITLES]
        lines.append([task, *(with_error(own) if own else "–" for own in found)])
    summary, norms = [], []
    for title in TITLES:
        own = {task: excess(rows, title, task) for task in PROBLEMS}
        ahead = sum(excess(rows, ADAMW, task) > value for task, value in own.items())
        within = sum(value <= 0.02 for value in own.values())
        middle = number(100 * statistics.median(own.values()), ".1f")
        summary.append([title, f"{middle} %", f"{within} of {len(own)}", str(ahead)])
    for task in PROBLEMS:
        row = rows.get(key_of({**setting(ANYTIME, task), "seed": 0}), {})
        if "kept statistics" in row:
            norms.append([task, *(f"{row[key]:.4f}" for key in ("value", "kept statistics"))])
    heads = ["", "median excess", "within 2 %", "ahead of tuned AdamW"]
    statistics_of = ["problem, seed 0", "new statistics of BatchNorm", "those of the training"]
    tables = (["problem", *TITLES], lines), (heads, summary), (statistics_of, norms)
    return "\n\n".join(markdown(*each) for each in tables)


def excess(rows: Rows, title: str, task: str) -> float:
    """Return the loss, or the share of errors, relative to ThorMuon with its schedule."""
    value, base = (statistics.fmean(figures(rows, name, task)) for name in (title, SCHEDULED))
    if PROBLEMS[task].higher:
        value, base = 1 - value, 1 - base
    return value / base - 1
