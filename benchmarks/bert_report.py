"""Tables and the picture of bert.py, from its raw data; what has not been run is left out."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert import CONTESTS, GRIDS, STORE, Contest, Training, search
from bert_time import OUT as STEP_TIMES
from torch_thor.bench import TUNING_SEED, drawing, markdown, missing, steps_to, write_tables

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "bert.png"
PEERS = ("lamb", "muon", "soap")


def there(contest: Contest, name: str) -> list[Training]:
    """Return the runs of an optimizer's best setting that there are."""
    if missing(search(contest, "adamw").tries, STORE) or missing(search(contest, name).tries, STORE):
        return []
    return [job for job in search(contest, name).chosen() if STORE.holds(job.key)]


def _steps(job: Training, target: float) -> float:
    steps = steps_to(job.result()["evaluations"], target)
    return float("inf") if steps is None else steps


def summary(contest: Contest, name: str) -> dict[str, Any]:
    """Return the figures of an optimizer."""
    jobs = there(contest, name)
    setting = jobs[0].setting
    found: dict[str, Any] = {
        "lr": setting.lr,
        "momentum": setting.momentum,
        "adamw_lr": setting.adamw_lr,
        "seeds": [job.seed for job in jobs],
        "accuracy": [job.final() for job in jobs],
        "loss": [job.result()["held_out_loss"][-1] for job in jobs],
    }
    for peer in PEERS:
        targets = {job.seed: job.final() for job in there(contest, peer)}
        found[f"steps_to_{peer}"] = [round(_steps(job, targets[job.seed]), 1) for job in jobs if job.seed in targets]
    return found


def figures() -> dict[str, Any]:
    """Return every figure of the tables."""
    result: dict[str, Any] = {}
    for contest in CONTESTS:
        rows: dict[str, Any] = {name: summary(contest, name) for name in GRIDS if there(contest, name)}
        if rows:
            rows["tuning"] = {str(job.setting): job.final() for name in rows for job in search(contest, name).tries}
            result[str(contest)] = rows
    return result


def tables() -> str:
    """Return the results as Markdown, and write them, with the figures as JSON, beside the raw data."""
    found = figures()
    costs = json.loads(STEP_TIMES.read_text())["ratio_to_adamw"] if STEP_TIMES.exists() else {}
    parts = []
    for contest in CONTESTS:
        if str(contest) in found:
            parts += [_contest(contest, found[str(contest)], costs.get(str(contest), {})), _tuning(contest)]
    text = "\n\n".join(parts)
    write_tables(STORE.folder, text, found)
    return text


def _contest(contest: Contest, rows: dict[str, Any], cost: dict[str, float]) -> str:
    heads = [
        f"batch {contest.batch_size}, {contest.steps} steps",
        "lr, momentum",
        "accuracy, median (each seed)",
        "loss",
    ]
    heads += ["step over AdamW's"]
    heads += [f"{what} to {peer}'s end, over {peer}'s" for peer in PEERS for what in ("steps", "time")]
    table: list[Sequence[str]] = []
    for name, row in rows.items():
        if name == "tuning":
            continue
        setting = f"{row['lr']:g}, {row['momentum']:g}"
        cells = [name, setting, markdown.middle(row["accuracy"], ".2%"), f"{statistics.median(row['loss']):.3f}"]
        cells.append(f"{cost[name]:.2f}" if name in cost else "-")
        for peer in PEERS:
            shares = [steps / contest.steps for steps in row[f"steps_to_{peer}"]]
            cells.append(markdown.middle(shares, ".2f") if shares else "-")
            times = [share * cost[name] / cost[peer] for share in shares] if {name, peer} <= cost.keys() else []
            cells.append(markdown.middle(times, ".2f") if times else "-")
        table.append(cells)
    return markdown.table(heads, table)


def _tuning(contest: Contest) -> str:
    """Return the accuracy of every setting in the tuning seed."""
    heads = ("tuning, momentum", "lr: accuracy")
    rows: list[Sequence[str]] = []
    for name, (_, momenta) in GRIDS.items():
        if not there(contest, name):
            continue
        for momentum in momenta:
            jobs = [job for job in search(contest, name).tries if job.setting.momentum == momentum]
            cells = ", ".join(f"{job.setting.lr:g}: {job.final():.2%}" for job in jobs)
            rows.append((f"{name}, {momentum:g}", cells))
    return markdown.table(heads, rows)


def draw() -> None:
    """Draw accuracy against steps, and against time where step times have been taken."""
    from matplotlib.figure import Figure  # slow to import

    shown = [contest for contest in CONTESTS if any(there(contest, name) for name in GRIDS)]
    if not shown:
        return
    costs = json.loads(STEP_TIMES.read_text())["ratio_to_adamw"] if STEP_TIMES.exists() else {}
    figure = Figure(figsize=(11, 4 * len(shown)), layout="constrained")
    for axes, contest in zip(figure.subplots(len(shown), 2, squeeze=False), shown, strict=True):
        cost = costs.get(str(contest), {})
        for name in GRIDS:
            runs = [job.result()["evaluations"] for job in there(contest, name)]
            if not runs:
                continue
            steps = [step for step, _ in runs[0]]
            series = [[value for _, value in run] for run in runs]
            drawing.draw_band(axes[0], steps, series, label=name, shade=0.15, middle=statistics.median)
            if name in cost:
                times = [step * cost[name] for step in steps]
                drawing.draw_band(axes[1], times, series, label=name, shade=0.15, middle=statistics.median)
        axes[0].set(
            xlabel="step", ylabel="masked-token accuracy, held out", title=f"bert-tiny, batch {contest.batch_size}"
        )
        axes[1].set(xlabel="time, in steps of AdamW", title=f"each tuned in seed {TUNING_SEED}, then three others")
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.legend()
    drawing.save(figure, PICTURE)
