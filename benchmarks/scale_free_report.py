"""Table and pictures of scale_free.py, from its raw data; seeds that have not been run are left out."""

import json
import statistics
from pathlib import Path
from typing import Any

from contenders import HEAT_LRS, PEERS, THOR_DAMPINGS, USUAL_MOMENTUM
from scale_free import (
    HALF_TASKS,
    MORE_HALVES,
    MORE_SEEDS,
    RESULTS,
    SEEDS,
    TUNING_SEED,
    Job,
    confirmation,
    further,
    half_tuning,
    halved,
    heat_map,
    lower_momentum,
    tuning,
)
from tasks import TASKS

PICTURES = Path(__file__).parents[1] / "docs" / "images"
NAMES = (*PEERS, "thor")


def steps_to(job: Job, target: float) -> float | None:
    """Return the step at which a run reaches a figure, interpolated between two evaluations.

    Args:
        job: a run.
        target: the figure.

    Returns:
        The first such step; None if there is none.
    """
    sign = 1 if TASKS[job.task].higher else -1
    before: tuple[float, float] | None = None
    for step, value in job.result()["evaluations"]:
        if sign * (value - target) >= 0:
            if before is None or before[1] == value:
                return float(step)
            return before[0] + (step - before[0]) * (target - before[1]) / (value - before[1])
        before = (step, value)
    return None


def share(job: Job, target: float) -> float:
    """Return steps to a target as a share of the task's steps, which SGD takes.

    Args:
        job: a run.
        target: the figure.

    Returns:
        The share; inf where the target is not reached.
    """
    steps = steps_to(job, target)
    return float("inf") if steps is None else steps / TASKS[job.task].steps


def done(task: str, optimizer: str) -> list[Job]:
    """Return the confirmation runs that there are, seeds in which SGD has run too.

    Args:
        task: key of ``TASKS``.
        optimizer: one of ``NAMES``.

    Returns:
        Jobs, a seed each.
    """
    return _with_sgd([confirmation(task, optimizer, seed) for seed in SEEDS])


def done_half(task: str, optimizer: str) -> list[Job]:
    """Return the runs of half the length that there are, seeds in which SGD has run at full length.

    Args:
        task: key of ``TASKS``.
        optimizer: one of ``NAMES``.

    Returns:
        Jobs, a seed each; none where the optimizer has no such runs.
    """
    if optimizer != "thor" and task not in HALF_TASKS:
        return []
    return _with_sgd([halved(task, optimizer, seed) for seed in SEEDS])


def _with_sgd(jobs: list[Job]) -> list[Job]:
    return [job for job in jobs if job.file.exists() and confirmation(job.task, "sgd", job.seed).file.exists()]


def summary(jobs: list[Job]) -> dict[str, Any]:
    """Return the figures of an optimizer's runs on one task.

    Args:
        jobs: a seed each, of one setting.

    Returns:
        The setting, the final figures and the steps to SGD's and Muon's final, seed by seed.
    """
    against = {
        name: [
            (job, confirmation(job.task, name, job.seed))
            for job in jobs
            if confirmation(job.task, name, job.seed).file.exists()
        ]
        for name in ("sgd", "muon")
    }
    return {
        "lr": jobs[0].lr,
        "momentum": jobs[0].momentum or USUAL_MOMENTUM[jobs[0].optimizer],
        "seeds": [job.seed for job in jobs],
        "final": [job.final() for job in jobs],
        "share_of_sgd_steps": [round(share(job, peer.final()), 3) for job, peer in against["sgd"]],
        "share_to_muons_final": [round(share(job, peer.final()), 3) for job, peer in against["muon"]],
    }


def tuned(task: str, name: str) -> dict[str, dict[str, float]]:
    """Return the final figures in the tuning seed.

    Args:
        task: key of ``TASKS``.
        name: one of ``NAMES``.

    Returns:
        By kind of run, and by learning rate and momentum.
    """
    if name == "thor":
        return {"half": {f"{job.lr:g}": job.final() for job in tuning(task, name)}}
    full = tuning(task, name) + lower_momentum(task, name)
    half = half_tuning(task, name) if task in HALF_TASKS else []
    return {
        kind: {f"{job.lr:g}, {job.momentum or USUAL_MOMENTUM[name]:g}": job.final() for job in jobs}
        for kind, jobs in (("full", full), ("half", half))
        if jobs
    }


def more_seeds(task: str) -> dict[str, Any]:
    """Return the figures of all seeds, those of the table among them, for the optimizers that have more.

    Args:
        task: one of ``HALF_TASKS``.

    Returns:
        The seeds that there are, and final figures in their order.
    """
    jobs = {seed: further(task, seed) for seed in (*SEEDS, *MORE_SEEDS)}
    there = {seed: row for seed, row in jobs.items() if all(job.file.exists() for job in row)}
    names = ("sgd", *(f"{name}, half" for name in MORE_HALVES))
    finals = {name: [row[i].final() for row in there.values()] for i, name in enumerate(names)}
    return {"seeds": list(there), **finals}


def figures() -> dict[str, Any]:
    """Return every figure of the table.

    Returns:
        By task and row (an optimizer at full or at half length).
    """
    result: dict[str, Any] = {}
    for task in TASKS:
        rows = {name: done(task, name) for name in NAMES}
        rows |= {f"{name}, half": done_half(task, name) for name in NAMES}
        result[task] = {row: summary(jobs) for row, jobs in rows.items() if jobs}
        result[task]["tuning"] = {name: tuned(task, name) for name in NAMES}
        if task in HALF_TASKS:
            result[task]["more seeds"] = more_seeds(task)
    return result


def table() -> str:
    """Return the result as Markdown, and write it with the figures as JSON.

    Returns:
        The table.
    """
    found = figures()
    lines = [
        "| task (figure) | optimizer | lr, momentum | final, median (each seed) | steps to SGD's final, as a share, "
        "median (each seed) | steps to Muon's final, as a share, median (each seed) |",
        "|---|---|---|---|---|---|",
    ]
    for task, spec in TASKS.items():
        digits = 4 if spec.higher else 3
        for name, entry in found[task].items():
            if name in ("tuning", "more seeds"):
                continue
            finals = ", ".join(f"{f:.{digits}f}" for f in entry["final"])
            shares = (_shares_text(entry[key]) for key in ("share_of_sgd_steps", "share_to_muons_final"))
            lines.append(
                f"| {task} ({spec.metric}) | {name} | {entry['lr']:g}, {entry['momentum']:g} | "
                f"{statistics.median(entry['final']):.{digits}f} ({finals}) | {' | '.join(shares)} |"
            )
    text = "\n".join(lines)
    (RESULTS / "table.md").write_text(text + "\n")
    (RESULTS / "table.json").write_text(json.dumps(found, indent=1).replace("Infinity", "null") + "\n")
    return text


def _shares_text(values: list[float]) -> str:
    return f"{_share_text(statistics.median(values))} ({', '.join(map(_share_text, values))})"


def _share_text(value: float) -> str:
    return "never" if value == float("inf") else f"{value:.2f}"


def draw() -> None:
    """Draw the curves and the heat maps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    PICTURES.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(5 * len(TASKS), 3.8), layout="constrained")
    for axis, (task, spec) in zip(axes, TASKS.items(), strict=True):
        curves = {name: done(task, name) for name in NAMES} | {"thor, half": done_half(task, "thor")}
        for name, jobs in curves.items():
            runs = [job.result()["evaluations"] for job in jobs]
            if not runs:
                continue
            steps = [step for step, _ in runs[0]]
            columns = list(zip(*([value for _, value in run] for run in runs), strict=True))
            (line,) = axis.plot(steps, [statistics.median(c) for c in columns], label=name)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
        axis.set(xlabel="step", ylabel=spec.metric, title=task)
        if spec.higher:
            axis.set_ylim(bottom=0.7)
        else:
            axis.set_yscale("log")
        axis.legend()
    figure.savefig(PICTURES / "scale_free.png", dpi=110)

    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(5 * len(TASKS), 3.2), layout="constrained")
    for axis, (task, spec) in zip(axes, TASKS.items(), strict=True):
        rows = [[job.final() if job.file.exists() else float("nan") for job in row] for row in heat_map(task)]
        image = axis.imshow(rows, aspect="auto", origin="lower", cmap="viridis" if spec.higher else "viridis_r")
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                if value == value:
                    text = f"{value:.3f}" if spec.higher else f"{value:.3g}"
                    axis.text(j, i, text, ha="center", va="center", color="white", fontsize=8)
        axis.set_xticks(range(len(HEAT_LRS)), [f"{lr:g}" for lr in sorted(HEAT_LRS)])
        axis.set_yticks(range(len(THOR_DAMPINGS)), [f"{d:g}" for d in THOR_DAMPINGS])
        axis.set(xlabel="lr", ylabel="damping", title=f"{task}: {spec.metric}, half, seed {TUNING_SEED}")
        figure.colorbar(image)
    figure.savefig(PICTURES / "scale_free_heat.png", dpi=110)
