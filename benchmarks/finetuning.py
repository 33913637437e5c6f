"""ThorMuon without a learning rate against AdamW, where a trained network adapts to other data.

    python -m benchmarks finetuning           # runs what is missing, then tables and picture
    python -m benchmarks finetuning --table

The problems are those of finetuning_problems.py. A seed that serves nothing else (three for MiniLM
on SST-2 and TREC) and one half of the held-out data choose the learning rate of AdamW; then three
other seeds run, and the other half gives the figures. ThorMuon has no learning rate, or 0.08 for
all weights. The raw data have more: trials of other rates, factors and ways
(benchmarks/results/tried.md).
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.finetuning_problems import PROBLEMS, UNSEEN
from benchmarks.runner.drawing import legend_below, save
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.stores import key_of
from benchmarks.training import (
    TUNING_SEEDS,
    Job,
    Rows,
    cell,
    confirm,
    optimizers,
    run,
    tolerance,
    values,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "headlines", "jobs", "optimizers", "run", "table", "tolerance"]

EVERY = PROBLEMS | UNSEEN
ADAMW = {False: (2e-5, 5e-5, 1e-4, 2e-4), True: (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)}  # LoRA or not
BEYOND = {False: (5e-4, 1e-3, 2e-3), True: (5e-3, 1e-2)}  # LoRA or not; more than is usual
OURS: dict[str, Job] = {
    "ThorMuon, 0.08 for all": {"optimizer": "thor-muon", "lr": 0.08},
    "ThorMuon, no learning rate": {"optimizer": "thor-muon"},
}
README = ("minilm-subj",)
PICTURE = Path("docs/images/fine-tuning.png")
COLOURS = {  # of Okabe and Ito
    "AdamW, tuned": "#e69f00",
    "ThorMuon, 0.08 for all": "#999999",
    "ThorMuon, no learning rate": "#0072b2",
}
FRONT = ("AdamW, tuned", "ThorMuon, no learning rate")  # on the front page


def jobs(rows: Rows) -> list[Job]:
    """List the jobs that are known."""
    found: list[Job] = []
    for problem in EVERY:
        for seed in (
            TUNING_SEEDS if problem in PROBLEMS and "minilm" in problem else TUNING_SEEDS[:1]
        ):
            found += [{**job, "seed": seed} for job in trials(problem)]
    for problem in EVERY:
        best = {chosen_rate(rows, problem, within) for within in (ADAMW["lora" in problem], None)}
        rates = sorted(lr for lr in best if lr is not None)
        if len(rates) == len(best):
            adamw: list[Job] = [{"optimizer": "torch-adamw", "lr": lr} for lr in rates]
            settings = [*adamw, *OURS.values()]
            found += [job for own in settings for job in confirm({"task": problem, **own})]
    return found


def trials(problem: str) -> list[Job]:
    """List AdamW with each of its learning rates."""
    lora = "lora" in problem
    job: Job = {"task": problem, "optimizer": "torch-adamw"}
    return [{**job, "lr": lr} for lr in ADAMW[lora] + BEYOND[lora]]


def chosen_rate(rows: Rows, problem: str, within: Sequence[float] | None) -> float | None:
    """Return AdamW's best learning rate on the seeds that choose, once all have run."""
    found = {}
    for job in trials(problem):
        if within is None or job["lr"] in within:
            runs = (rows.get(key_of({**job, "seed": seed})) for seed in TUNING_SEEDS)
            found[job["lr"]] = [row["value"] for row in runs if row is not None]
    if not all(found.values()):
        return None
    sign = 1 if EVERY[problem].higher else -1
    return max(found, key=lambda lr: sign * statistics.fmean(found[lr]))


def adamw(rows: Rows, problem: str, within: Sequence[float] | None = None) -> Job:
    """Return AdamW with its best rate."""
    lr = chosen_rate(rows, problem, within)
    return {"task": problem, "optimizer": "torch-adamw", "lr": lr}


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of ThorMuon and of AdamW on each problem whose row README shows."""
    ours = [{"task": problem, "optimizer": "thor-muon"} for problem in README]
    return [{**job, "seed": 0} for job in (*ours, *(adamw(rows, problem) for problem in README))]


# ---- what is shown -------------------------------------------------------------------------------


def table(rows: Rows) -> str:
    """Return the figures, and AdamW's trials."""
    heads = ["problem", "AdamW, usual rates", "AdamW, any rate", *OURS]
    lines, tried = [], []
    for problem, about in EVERY.items():
        theirs = [adamw(rows, problem, within) for within in (ADAMW["lora" in problem], None)]
        cells = [f"{cell(rows, job)} ({job['lr']:g})" for job in theirs]
        cells += [cell(rows, {"task": problem, **job}) for job in OURS.values()]
        lines.append([about.title, *cells])
        tried.append([problem, ", ".join(trial(rows, job) for job in trials(problem))])
    choice = markdown(["problem", "AdamW's learning rate: figure of its trials"], tried)
    return f"{markdown(heads, lines)}\n\n{choice}"


def trial(rows: Rows, job: Job) -> str:
    """Return the figure of a trial, a mean over the seeds that chose."""
    runs = [rows.get(key_of({**job, "seed": seed}), {}).get("value") for seed in TUNING_SEEDS]
    known = [value for value in runs if value is not None]
    return f"{job['lr']:g}: {with_error(known) if len(known) > 1 else f'{known[0]:.4f}'}"


def draw(rows: Rows) -> None:
    """Draw all problems: accuracies above, losses below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.4), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(9, 2))
    for panel, (name, higher) in zip(
        panels, (("held-out accuracy", True), ("held-out loss", False)), strict=True
    ):
        names = {key: key for key, problem in EVERY.items() if problem.higher is higher}
        compare(panel, rows, names, tuple(COLOURS))
        panel.set(xlabel=name)
    legend_below(figure, panels[:1])
    save(figure, PICTURE)


def compare(panel: "Axes", rows: Rows, problems: Mapping[str, str], names: Sequence[str]) -> None:
    """Draw means and standard errors on some problems, a line for each."""
    for place, problem in enumerate(problems):
        for number, name in enumerate(reversed(names)):
            ours = {"task": problem, **OURS.get(name, {})}
            found = values(rows, ours if name in OURS else adamw(rows, problem))
            error = statistics.stdev(found) / len(found) ** 0.5
            panel.errorbar(
                [statistics.fmean(found)], [place + 0.15 * number], xerr=[error],
                fmt="o", markersize=9, elinewidth=2, color=COLOURS[name],
                label=name if place == 0 else None,
            )  # fmt: skip
    panel.set_yticks(range(len(problems)), list(problems.values()))
    panel.set_ylim(len(problems) - 0.4, -0.4)  # the first is above
    panel.grid(alpha=0.3)
