"""Table and pictures of scale_free.py, from its raw data; seeds that have not been run are left out."""

import json
import statistics
from pathlib import Path
from typing import Any

from contenders import HEAT_LRS, PEERS, THOR_DAMPINGS
from scale_free import RESULTS, SEEDS, TUNING_SEED, Job, best, confirmation, halved, heat_map, thor_lr, tuning
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
    jobs = [(confirmation(task, optimizer, seed), confirmation(task, "sgd", seed)) for seed in SEEDS]
    return [job for job, sgd in jobs if job.file.exists() and sgd.file.exists()]


def figures() -> dict[str, Any]:
    """Return every figure of the table.

    Returns:
        By task and optimizer: the chosen lr, the final figures and the shares of SGD's steps, seed by seed.
    """
    result: dict[str, Any] = {}
    for task in TASKS:
        result[task] = {}
        for name in NAMES:
            jobs = done(task, name)
            targets = [confirmation(task, "sgd", job.seed).final() for job in jobs]
            result[task][name] = {
                "lr": thor_lr() if name == "thor" else best(tuning(task, name)).lr,
                "seeds": [job.seed for job in jobs],
                "final": [job.final() for job in jobs],
                "share_of_sgd_steps": [round(share(job, t), 3) for job, t in zip(jobs, targets, strict=True)],
                "share_to_muons_final": [
                    round(share(job, confirmation(task, "muon", job.seed).final()), 3)
                    for job in jobs
                    if confirmation(task, "muon", job.seed).file.exists()
                ],
                "final_of_half_the_steps": [
                    halved(task, seed).final() for seed in SEEDS if name == "thor" and halved(task, seed).file.exists()
                ],
                "final_in_tuning_seed": {f"{job.lr:g}": job.final() for job in tuning(task, name)},
            }
    return result


def table() -> str:
    """Return the result as Markdown, and write it with the figures as JSON.

    Returns:
        The table.
    """
    found = figures()
    lines = [
        "| task (figure) | optimizer | lr | final, median (each seed) | steps to SGD's final, as a share, median (each "
        "seed) | steps to Muon's final, as a share, median (each seed) |",
        "|---|---|---|---|---|---|",
    ]
    for task, spec in TASKS.items():
        digits = 4 if spec.higher else 3
        for name, entry in found[task].items():
            if not entry["final"]:
                continue
            finals = ", ".join(f"{f:.{digits}f}" for f in entry["final"])
            shares = (_shares_text(entry[key]) for key in ("share_of_sgd_steps", "share_to_muons_final"))
            lines.append(
                f"| {task} ({spec.metric}) | {name} | {entry['lr']:g} | "
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
        for name in NAMES:
            runs = [job.result()["evaluations"] for job in done(task, name)]
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
        axis.set(xlabel="lr", ylabel="damping", title=f"{task}: {spec.metric}, seed {TUNING_SEED}")
        figure.colorbar(image)
    figure.savefig(PICTURES / "scale_free_heat.png", dpi=110)
