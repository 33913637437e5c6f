"""Training loss and test accuracy against epochs and seconds, with momentum and THOR.

THOR is in the paper's settings.

Beside the three settings of the trace rule: THOR without a bound on the step, as in the paper, and
THOR_NT with an interval between refreshes that grows by a fifth at each refresh, against the
constant one of the recipe.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.figures import training
from benchmarks.figures.training import (
    Options,
    Row,
    clock_of,
    finals,
    grouped,
    measured,
    to_target,
)
from benchmarks.runner import markdown
from benchmarks.runner.drawing import draw_band, label_in_full, legend_below, save
from torch_thor import THOR

ABOUT = (
    "loss and accuracy against epochs and seconds: momentum, THOR, THOR_stop, THOR_NT, unbounded, "
    "growing interval"
)
TAKES = ("data", "epochs", "eval_interval", "seeds")
QUICK = ("epochs=1", "eval_interval=117")
UNBOUNDED = [f"{key}={json.dumps(value)}" for key, value in THOR.preset("paper").items()]
GROWING = {"kind": "geometric", "first": 10, "last": 468, "factor": 1.2}
SETTINGS = {
    "momentum": ("sgd", ()),
    **{name: ("thor", [f"trace_thresholds={name}"]) for name in ("thor", "thor_stop", "thor_nt")},
    "thor, unbounded": ("thor", UNBOUNDED),
    "thor_nt, growing interval": (
        "thor",
        ["trace_thresholds=thor_nt", f"update_interval={json.dumps(GROWING)}"],
    ),
}
MINUTES = {"momentum": "117 (8 devices)", "thor": "66.7 (8), 2.7 (256); reference practice: 72 (8)"}
THEIRS = (
    "Theirs, not ours, and another task: ResNet-50 on ImageNet to 75.9 %, Ascend 910. 66.7 and 2.7 "
    "min: abstract of Chen et al. 2021; 72 min: README of MindSpore's resnet_thor; 117 min: "
    "MindSpore's introduction to THOR, in whose curves THOR, THOR_stop and THOR_NT coincide."
)


def jobs(options: Options, device: str) -> list[Row]:
    """List the trainings."""
    settings = [({"setting": name}, *setting) for name, setting in SETTINGS.items()]
    return training.jobs_of(
        training.words_of(options, training.FASHION, QUICK), options, device, settings
    )


run, optimizers = measured, training.optimizers


def table(rows: Sequence[Row]) -> str:
    """Return final accuracies, what it took to reach momentum's, and what refreshes cost."""
    return comparison(rows, MINUTES, THEIRS)


def comparison(rows: Sequence[Row], minutes: Mapping[str, str], theirs: str) -> str:
    """Return a table of settings against the first one, and a text about others' minutes.

    The table has the minutes that others report, too.
    """
    settings, clock = grouped(rows, lambda job: job["setting"]), clock_of(rows)
    baseline, lines = next(iter(settings)), []
    targets = {row["job"]["seed"]: row["value"] for row in settings[baseline]}
    heads = (
        "setting", rows[0]["metric"], f"epochs to {baseline}'s of the same seed", f"{clock} to it",
        "theirs: minutes",
        f"{clock} of all steps", "ms of an ordinary step, of a refresh step", "refresh steps",
        "layers refreshed of those due",
    )  # fmt: skip
    for setting, own in settings.items():
        wanted = [targets[row["job"]["seed"]] for row in own]
        medians = [
            [row[key] for row in own if row[key] is not None]
            for key in ("step_ms", "refresh_step_ms")
        ]
        lines.append((
            setting, finals(own), to_target(own, wanted, ".2f", "epochs"),
            to_target(own, wanted, ".3g", "seconds"),
            minutes.get(setting, "-"), markdown.summary([row["seconds"] for row in own], ".3g"),
            ", ".join(f"{statistics.fmean(of):.0f}" if of else "none" for of in medians),
            ", ".join(str(row["refresh_steps"]) for row in own),
            f"{sum(row['refreshed'] for row in own)} of {sum(row['due'] for row in own)}",
        ))  # fmt: skip
    return f"{markdown.table(heads, lines)}\n\n{theirs}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw loss and metric against epochs and seconds.

    The mean over seeds is drawn with the range behind it.
    """
    from matplotlib.figure import Figure  # slow to import

    picture = Figure(figsize=(11, 7.6), layout="constrained")
    axes = picture.subplots(2, 2, sharey="row")
    for setting, own in grouped(
        [row for row in rows if row["failure"] is None], lambda job: job["setting"]
    ).items():
        scores = [
            [(one["step"], one["seconds"], one["value"]) for one in row["evaluations"]]
            for row in own
        ]
        for pair, runs in zip(axes, ([row["losses"] for row in own], scores), strict=True):
            steps, seconds, values = (
                [[point[i] for point in points] for points in runs] for i in range(3)
            )
            clock = [statistics.fmean(at) for at in zip(*seconds, strict=True)]
            epochs = [step / own[0]["steps_per_epoch"] for step in steps[0]]
            # thor_stop often coincides with thor
            for side, xs in zip(pair, (epochs, clock), strict=True):
                draw_band(
                    side, xs, values, label=setting, style="--" if setting == "thor_stop" else "-"
                )
    axes[0][0].set(yscale="log", ylabel=f"training loss, mean of {training.SMOOTHED + 1} steps")
    axes[1][0].set(xlabel="epochs", ylabel=f"held-out {rows[0]['metric']}")
    axes[1][1].set(xlabel=f"{clock_of(rows)} of training steps")
    for one in axes.flat:
        one.grid(alpha=0.3)
        label_in_full(one)
    legend_below(picture, axes[1])
    save(picture, path)
