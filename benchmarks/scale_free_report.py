"""Tables and pictures of scale_free.py, from its raw data; seeds that have not been run are left out."""

import json
import statistics
from pathlib import Path
from typing import Any

from contenders import USUAL_MOMENTUM
from scale_free import CONTESTS, PLAIN, RESULTS, THOR_LR, TUNING_SEED, Contest, Job, confirmation, tuning
from scale_free_time import OUT as STEP_TIMES
from tasks import TASKS

PICTURES = Path(__file__).parents[1] / "docs" / "images"


def steps_to(job: Job, target: float) -> float | None:
    """Return the step at which a run reaches a figure, interpolated between two evaluations.

    Args:
        job: a run.
        target: the figure.

    Returns:
        The first such step; None if there is none.
    """
    sign = 1 if TASKS[job.contest.task].higher else -1
    before: tuple[float, float] | None = None
    for step, value in job.result()["evaluations"]:
        if sign * (value - target) >= 0:
            if before is None or before[1] == value:
                return float(step)
            return before[0] + (step - before[0]) * (target - before[1]) / (value - before[1])
        before = (step, value)
    return None


def share(job: Job, target: float) -> float:
    """Return steps to a target as a share of the contest's steps.

    Args:
        job: a run.
        target: the figure.

    Returns:
        The share; inf where the target is not reached.
    """
    steps = steps_to(job, target)
    return float("inf") if steps is None else steps / round(TASKS[job.contest.task].steps * job.contest.length)


def there(contest: Contest, name: str) -> list[Job]:
    """Return the runs of a chosen setting that there are.

    Args:
        contest: the contest.
        name: one of ``contest.names``.

    Returns:
        Jobs, a seed each.
    """
    if name not in contest.names:
        return []
    return [job for job in (confirmation(contest, name, seed) for seed in contest.seeds(name)) if job.file.exists()]


def summary(contest: Contest, name: str) -> dict[str, Any]:
    """Return the figures of an optimizer in a contest.

    Args:
        contest: the contest.
        name: one of ``contest.names``.

    Returns:
        The setting, and, seed by seed, final figures and the shares of the steps to SGD's and Muon's final.
    """
    jobs = there(contest, name)
    setting = jobs[0].setting
    result: dict[str, Any] = {"lr": setting.lr, "seeds": [job.seed for job in jobs], "final": [j.final() for j in jobs]}
    if setting.optimizer != "thor":
        result["momentum"] = setting.momentum or USUAL_MOMENTUM[name]
    if setting.adamw_share is not None:
        result["adamw_share"] = setting.adamw_share
    for peer in ("sgd", "muon"):
        targets = {job.seed: job.final() for job in there(contest, peer)}
        result[f"to_{peer}"] = [round(share(job, targets[job.seed]), 3) for job in jobs if job.seed in targets]
    return result


def figures() -> dict[str, Any]:
    """Return every figure of the tables.

    Returns:
        By contest and optimizer; under ``"tuning"`` the final figures of the tuning seed by setting.
    """
    result: dict[str, Any] = {}
    for contest in CONTESTS:
        rows = {name: summary(contest, name) for name in contest.names if there(contest, name)}
        rows["tuning"] = {
            str(job.setting): job.final() for name in contest.names for jobs in tuning(contest, name) for job in jobs
        }
        result[str(contest)] = rows
    return result


def tables() -> str:
    """Return the results as Markdown, and write them with the figures as JSON.

    Returns:
        A table of all contests, and one of THOR's learning rates.
    """
    found = figures()
    costs = json.loads(STEP_TIMES.read_text())["ratio_to_sgd"] if STEP_TIMES.exists() else {}
    lines = [
        "| contest (figure) | optimizer | lr, momentum | final, median (each seed) | steps to SGD's final, share of "
        "the run | steps to Muon's final, share of Muon's run | time to Muon's final, share of Muon's |",
        "|---|---|---|---|---|---|---|",
    ]
    for contest in CONTESTS:
        task, digits = TASKS[contest.task], 4 if TASKS[contest.task].higher else 3
        for name, row in found[str(contest)].items():
            if name == "tuning":
                continue
            finals = _each(row["final"], digits)
            setting = f"{row['lr']:g}" + (f", {row['momentum']:g}" if "momentum" in row else "")
            setting += f", AdamW's {row['adamw_share']:g} of it" if "adamw_share" in row else ""
            cost = costs.get(contest.task, {})
            key = "thor" if name == PLAIN else name
            times = [s * cost[key] / cost["muon"] for s in row["to_muon"]] if {key, "muon"} <= cost.keys() else []
            timed = "-" if name == PLAIN or not times else _shares(times)
            lines.append(
                f"| {contest} ({task.metric}) | {name} | {setting} | "
                f"{statistics.median(row['final']):.{digits}f} ({finals}) | {_shares(row['to_sgd'])} | "
                f"{_shares(row['to_muon'])} | {timed} |"
            )
    lrs = [job.setting.lr for job in tuning(CONTESTS[0], "thor")[0]]
    lines += ["", "| contest | " + " | ".join(f"lr {lr:g}" for lr in lrs) + " |", "|---" * (len(lrs) + 1) + "|"]
    for contest in CONTESTS:
        digits = 4 if TASKS[contest.task].higher else 3
        cells = (f"{job.final():.{digits}f}" for job in tuning(contest, "thor")[0])
        lines.append(f"| {contest} | {' | '.join(cells)} |")
    text = "\n".join(lines)
    (RESULTS / "table.md").write_text(text + "\n")
    (RESULTS / "table.json").write_text(json.dumps(found, indent=1).replace("Infinity", "null") + "\n")
    return text


def _shares(values: list[float]) -> str:
    if not values:
        return "-"
    reached = [v for v in values if v != float("inf")]
    each = ", ".join(map(_share, values)) if len(values) <= 3 else f"{len(reached)} of {len(values)} seeds"
    return f"{_share(statistics.median(values))} ({each})"


def _each(values: list[float], digits: int) -> str:
    """Return the figures of three seeds one by one, of more their mean and its standard error."""
    if len(values) <= 3:
        return ", ".join(f"{v:.{digits}f}" for v in values)
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{len(values)} seeds, mean {statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def _share(value: float) -> str:
    return "never" if value == float("inf") else f"{value:.2f}"


def draw() -> None:
    """Draw the curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [Contest(task) for task in ("classifier", "classifier1024", "autoencoder", "language")]
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, len(shown), figsize=(5 * len(shown), 3.8), layout="constrained")
    for axis, contest in zip(axes, shown, strict=True):
        task = TASKS[contest.task]
        for name in contest.names:
            runs = [job.result()["evaluations"] for job in there(contest, name)]
            if not runs or name == PLAIN:
                continue
            steps = [step for step, _ in runs[0]]
            columns = list(zip(*([value for _, value in run] for run in runs), strict=True))
            (line,) = axis.plot(steps, [statistics.median(c) for c in columns], label=name)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
        axis.set(xlabel="step", ylabel=task.metric, title=str(contest))
        if task.higher:
            axis.set_ylim(bottom=0.7)
        else:
            axis.set_yscale("log")
        axis.legend()
    figure.suptitle(f"THOR at lr {THOR_LR:g} everywhere, the others tuned on each (seed {TUNING_SEED})")
    figure.savefig(PICTURES / "scale_free.png", dpi=110)
