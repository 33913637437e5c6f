"""nanoGPT's example for a CPU: ThorMuon with no option, nanoGPT's AdamW, tuned AdamW, Muon, SOAP.

    python -m benchmarks nanogpt            # runs what is missing, then tables and picture
    python -m benchmarks nanogpt --table

AdamW (nanoGPT's own), Muon and SOAP (those of the suite) have five trials of the learning rate
each, by a seed that serves nothing else. ThorMuon has no option but the model, so no weight decay.
Means and standard errors are of three seeds. Seconds are steps times the time of a
step, which all take in turns on one thread (the job named `alone`); refreshes count where they
happen, evaluations do not.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.optimizers import CONTENDERS
from benchmarks.runner.drawing import draw_band, legend_below, save
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.numbers import mean_curve, shares_until
from benchmarks.runner.stores import key_of
from benchmarks.runner.timing import seconds_at
from benchmarks.runner.trials import best_of, rates_around, shown
from benchmarks.training import SEEDS, TUNING_SEEDS, Job, Rows, confirm, optimizers, run, tolerance

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "headlines", "jobs", "optimizers", "run", "table", "tolerance"]

THEIRS: Job = {"task": "nanogpt", "optimizer": "nanogpt-adamw", "lr": 1e-3}
OURS: Job = {"task": "nanogpt", "optimizer": "thor-muon", "weight_decay": 0.0}
TUNED = {"nanogpt-adamw": "AdamW", "muon": "Muon", "soap": "SOAP"}
TIMES: Job = {"task": "nanogpt", "alone": True}
TIMES["settings"] = {name: {"optimizer": name} for name in (*TUNED, "thor-muon")}
TRIALS = 5
PICTURE = Path("docs/images/nanogpt.png")
COLOURS = {  # of Okabe and Ito
    "nanoGPT's AdamW": "#999999", "AdamW, tuned": "#e69f00", "Muon, tuned": "#d55e00",
    "SOAP, tuned": "#cc79a7", "ThorMuon": "#0072b2",
}  # fmt: skip


def jobs(rows: Rows) -> list[Job]:
    """List the jobs that are known: which come next depends on what was best so far."""
    found = [*confirm(OURS), *confirm(THEIRS)]
    found += [job for name in TUNED for job in tuning(rows, name)]
    for setting in chosen(rows).values():
        found += [job for job in confirm(setting) if job not in found]
    return [*found, TIMES]


def tuning(rows: Rows, name: str) -> list[Job]:
    """Return the trials of an optimizer, as far as they are known."""
    setting = {"task": "nanogpt", "optimizer": name, "seed": TUNING_SEEDS[0]}
    return rates_around(rows, setting, CONTENDERS[name.removeprefix("nanogpt-")].lr, count=TRIALS)


def chosen(rows: Rows) -> dict[str, Job]:
    """Return the best setting of each optimizer whose trials are there."""
    best = {name: best_of(rows, tuning(rows, name), count=TRIALS) for name in TUNED}
    return {name: setting for name, setting in best.items() if setting is not None}


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of each that README shows."""
    return [{**setting, "seed": SEEDS[0]} for setting in (OURS, THEIRS, *chosen(rows).values())]


# ---- what is shown -------------------------------------------------------------------------------


def contestants(rows: Rows) -> dict[str, Job]:
    """Return those that are shown and have all their seeds, by name."""
    settings: dict[str, Job] = {"nanoGPT's AdamW": THEIRS}
    settings |= {f"{TUNED[name]}, tuned": setting for name, setting in chosen(rows).items()}
    settings["ThorMuon"] = OURS
    return {
        name: setting
        for name, setting in settings.items()
        if all(rows.get(key_of(job), {}).get("value") for job in confirm(setting))
    }


def curves(rows: Rows, setting: Job) -> list[list[Sequence[float]]]:
    """Return the curves of all seeds."""
    return [rows[key_of(job)]["curve"] for job in confirm(setting)]


def seconds(rows: Rows, setting: Job) -> list[float]:
    """Return the seconds of training up to each evaluation; none before steps are timed."""
    times = rows.get(key_of(TIMES))
    curve = rows[key_of(confirm(setting)[0])]["curve"]
    return seconds_at(times, setting["optimizer"], "nanogpt-adamw", curve) if times else []


def table(rows: Rows) -> str:
    """Return what each ends at and when ThorMuon is there, then the trials."""
    heads = ["optimizer", "learning rate", "validation loss", "ThorMuon is there after: steps"]
    heads += ["seconds", "step / AdamW's", "bytes a parameter"]
    lines = [[title, shown(rows, tuning(rows, name))] for name, title in TUNED.items()]
    trials = markdown(["tuned", "learning rate: validation loss of the trial"], lines)
    return f"{markdown(heads, ends(rows))}\n\n{trials}"


def ends(rows: Rows) -> list[list[str]]:
    """Return the cells of each contestant."""
    found, lines = contestants(rows), []
    for name, setting in found.items():
        last = [curve[-1][1] for curve in curves(rows, setting)]
        rate = f"{setting['lr']:g}" if "lr" in setting else "none given"
        shares = ["", ""]
        if name != "ThorMuon" and "ThorMuon" in found:
            own, goal = mean_curve(curves(rows, OURS)), statistics.fmean(last)
            spent = seconds(rows, OURS), seconds(rows, setting)
            shares = shares_until(own, goal, *spent, higher=False)
        lines.append([name, rate, with_error(last), *shares, *costs(rows, setting)])
    return lines


def costs(rows: Rows, setting: Job) -> list[str]:
    """Return the time of a step over AdamW's, and bytes of state a parameter."""
    times: Any = rows.get(key_of(TIMES))
    if times is None:
        return ["", ""]
    relative = seconds(rows, setting)[-1] / seconds(rows, THEIRS)[-1]
    return [f"{relative:.2f}", f"{times['state_bytes'][setting['optimizer']]:.1f}"]


def draw(rows: Rows) -> None:
    """Draw the losses against steps and seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    against(axes[0], rows, timed=False)
    against(axes[1], rows, timed=True)
    axes[0].set_ylabel("validation loss")
    legend_below(figure, axes[:1])
    save(figure, PICTURE)


def against(panel: "Axes", rows: Rows, *, timed: bool) -> None:
    """Draw the losses against seconds, or against steps."""
    lowest = math.inf
    for name, setting in contestants(rows).items():
        steps, means = zip(*mean_curve(curves(rows, setting)), strict=True)
        losses = [[point[1] for point in curve] for curve in curves(rows, setting)]
        label = f"{name} ({setting['lr']:g})" if "lr" in setting else f"{name}, no option"
        xs = seconds(rows, setting) if timed else steps
        draw_band(panel, xs, losses, label=label, colour=COLOURS[name])
        lowest = min(lowest, *means)
    panel.set(xlabel="seconds, one core" if timed else "steps", ylim=(lowest - 0.03, 2.5))
    panel.grid(alpha=0.3)
