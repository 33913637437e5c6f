"""Tables and pictures of scale_free.py from its raw data. Seeds that have not been run are left out."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders import USUAL_MOMENTUM
from scale_free import CONTESTS, PLAIN, SEEDS, STORE, THOR_LR, TUNING_SEED, Contest, Training, confirmation, tuning
from scale_free_time import OUT as STEP_TIMES
from tasks import TASKS
from torch_thor.bench import drawing, markdown, steps_to, write_tables

PICTURES = Path(__file__).parents[1] / "docs" / "images"


def share(job: Training, target: float) -> float:
    """Return steps to a target as a share of the contest's steps.

    Args:
        job: a run.
        target: the figure.

    Returns:
        The share; inf where the target is not reached.
    """
    task = TASKS[job.contest.task]
    steps = steps_to(job.result()["evaluations"], target, higher=task.higher)
    return float("inf") if steps is None else steps / round(task.steps * job.contest.length)


def there(contest: Contest, name: str) -> list[Training]:
    """Return the runs of a chosen setting that there are.

    Args:
        contest: the contest.
        name: one of ``contest.names``.

    Returns:
        Jobs, a seed each.
    """
    if name not in contest.names:
        return []
    return [job for job in (confirmation(contest, name, seed) for seed in contest.seeds(name)) if STORE.holds(job.key)]


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
        rows["tuning"] = {str(job.setting): job.final() for name in contest.names for job in tuning(contest, name)}
        result[str(contest)] = rows
    return result


def tables() -> str:
    """Return the results as Markdown, and write them with the figures as JSON.

    Returns:
        A table of all contests, one of the closest with ten seeds, and one of THOR's learning rates.
    """
    found = figures()
    costs = json.loads(STEP_TIMES.read_text())["ratio_to_sgd"] if STEP_TIMES.exists() else {}
    heads = (
        "contest (figure)",
        "optimizer",
        "lr, momentum",
        "final, median (each seed)",
        "steps to SGD's final, share of the run",
        "steps to Muon's final, share of Muon's run",
        "time to Muon's final, share of Muon's",
    )
    rows: list[Sequence[str]] = []
    for contest in CONTESTS:
        task, form = TASKS[contest.task], _form(contest)
        for name, row in found[str(contest)].items():
            if name == "tuning":
                continue
            setting = f"{row['lr']:g}" + (f", {row['momentum']:g}" if "momentum" in row else "")
            setting += f", AdamW's {row['adamw_share']:g} of it" if "adamw_share" in row else ""
            cost = costs.get(contest.task, {})
            key = "thor" if name == PLAIN else name
            times = [s * cost[key] / cost["muon"] for s in row["to_muon"]] if {key, "muon"} <= cost.keys() else []
            rows.append(
                (
                    f"{contest} ({task.metric})",
                    name,
                    setting,
                    f"{format(statistics.median(row['final']), form)} ({_each(row['final'], form)})",
                    _shares(row["to_sgd"]),
                    _shares(row["to_muon"]),
                    "-" if name == PLAIN else _shares(times),
                )
            )
    lrs = [f"lr {job.setting.lr:g}" for job in tuning(CONTESTS[0], "thor")]
    finals = [
        (str(contest), *(format(job.final(), _form(contest)) for job in tuning(contest, "thor")))
        for contest in CONTESTS
    ]
    parts = [markdown.table(heads, rows), narrow_table(costs), markdown.table(("contest", *lrs), finals)]
    text = "\n\n".join(parts)
    write_tables(STORE.folder, text, found)
    return text


def narrow_table(costs: dict[str, dict[str, float]]) -> str:
    """Return when each seed of the closest contests reaches what Muon ends with on average.

    A target of its own for each seed, as in the table of all contests, doubles the noise where final figures differ by
    less than seeds do.

    Args:
        costs: of a step, over SGD's, by task and optimizer.

    Returns:
        A Markdown table, Muon among the rows.
    """
    heads = (
        "contest",
        "Muon's mean final",
        "optimizer",
        "seeds that reach it",
        "steps, median share of the run",
        "time, share of Muon's run",
    )
    rows: list[Sequence[str]] = []
    for contest in CONTESTS:
        muon = there(contest, "muon")
        if len(muon) <= len(SEEDS):
            continue
        target, cost = statistics.fmean(job.final() for job in muon), costs.get(contest.task, {})
        for name in ("muon", "thor"):
            shares = [share(job, target) for job in there(contest, name)]
            reached = sum(value != float("inf") for value in shares)
            steps = statistics.median(shares)
            time = steps * cost[name] / cost["muon"] if {name, "muon"} <= cost.keys() else None
            rows.append(
                (
                    str(contest),
                    format(target, _form(contest)),
                    name,
                    f"{reached} of {len(shares)}",
                    markdown.number(steps, ".2f"),
                    "-" if time is None else markdown.number(time, ".2f"),
                )
            )
    return markdown.table(heads, rows)


def _form(contest: Contest) -> str:
    return ".4f" if TASKS[contest.task].higher else ".3f"


def _shares(values: list[float]) -> str:
    if not values:
        return "-"
    if len(values) <= 3:
        return markdown.middle(values, ".2f")
    reached = sum(value != float("inf") for value in values)
    return f"{markdown.number(statistics.median(values), '.2f')} ({reached} of {len(values)} seeds)"


def _each(values: list[float], form: str) -> str:
    """Return the figures of three seeds one by one, of more their mean and its standard error."""
    if len(values) <= 3:
        return ", ".join(format(value, form) for value in values)
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{len(values)} seeds, mean {format(statistics.fmean(values), form)} ± {format(error, form)}"


def draw() -> None:
    """Draw the curves."""
    from matplotlib.figure import Figure  # slow to import

    shown = [Contest(task) for task in ("classifier", "classifier1024", "autoencoder", "language")]
    figure = Figure(figsize=(5 * len(shown), 3.8), layout="constrained")
    for axis, contest in zip(figure.subplots(1, len(shown)), shown, strict=True):
        task = TASKS[contest.task]
        for name in contest.names:
            runs = [job.result()["evaluations"] for job in there(contest, name)]
            if not runs or name == PLAIN:
                continue
            steps = [step for step, _ in runs[0]]
            series = [[value for _, value in run] for run in runs]
            drawing.draw_band(axis, steps, series, label=name, shade=0.15, middle=statistics.median)
        axis.set(xlabel="step", ylabel=task.metric, title=str(contest))
        if task.higher:
            axis.set_ylim(bottom=0.7)
        else:
            axis.set_yscale("log")
        axis.legend()
    figure.suptitle(f"THOR at lr {THOR_LR:g} everywhere, the others tuned on each (seed {TUNING_SEED})")
    drawing.save(figure, PICTURES / "scale_free.png")
