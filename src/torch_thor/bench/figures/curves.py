"""Training loss and test accuracy against epochs and against seconds: momentum, THOR, THOR_stop and THOR_NT."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from torch_thor.bench import markdown
from torch_thor.bench.drawing import COLOURS, STYLES, draw_band, note, save
from torch_thor.bench.figures import paper
from torch_thor.bench.figures.figure import Figure, Options, recipe_of, write_title
from torch_thor.bench.figures.measuring import recipe_settings, train_run
from torch_thor.bench.figures.raw import RawData
from torch_thor.bench.figures.run_times import (
    epochs_to,
    milliseconds,
    processor_time_counts,
    seconds_of,
    seconds_to,
    time_unit,
)
from torch_thor.bench.markdown import reached, summary
from torch_thor.bench.numbers import running_mean

BASELINE = "momentum"
SETTINGS = {BASELINE: "sgd", "thor": "thor", "thor_stop": "thor", "thor_nt": "thor"}  # the optimizer of each setting
SEEDS = (0, 1, 2)
SMOOTHED = 25  # the number of preceding steps in the running mean of the loss


def settings(options: Options, device: str) -> dict[str, Any]:
    """Return the settings of the figure."""
    recipe = recipe_settings(recipe_of(options, ["sgd", "thor"]), ["sgd", "thor"])
    recipe["optimizers"]["thor"].pop("trace_thresholds")  # each setting has its own
    return {"recipe": recipe, "device": device, "seeds": options.seeds or SEEDS, "settings": list(SETTINGS)}


def jobs(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of the figure, seed by seed, so that an interrupted measurement has complete seeds."""
    return [{"setting": name, "seed": seed} for seed in settings["seeds"] for name in settings["settings"]]


def measure(settings: Mapping[str, Any], job: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Train once."""
    name, seed = job["setting"], job["seed"]
    words = [f"seed={seed}", *([] if name == BASELINE else [f"trace_thresholds={name}"])]
    return train_run(settings, SETTINGS[name], words, console, label=f"{name}, seed {seed}").plain()


def table(raw: RawData) -> str:
    """Return a table of the final accuracies, and of the epochs and seconds to that of momentum."""
    targets = {run["job"]["seed"]: run["evaluations"]["top1"][-1] for run in raw.chosen(setting=BASELINE)}
    processor = processor_time_counts(raw.settings, raw.machine)
    heads = (
        "setting",
        "final accuracy, mean ± standard deviation (each seed)",
        "epochs to momentum's final accuracy of the same seed",
        "seconds to it",
        "an ordinary step, a refresh step (medians)",
        "layers refreshed of those due",
    )
    rows = []
    for name in raw.settings["settings"]:
        runs = raw.chosen(setting=name)
        wanted = [(run, targets[run["job"]["seed"]]) for run in runs]
        cells = (
            name,
            summary([run["evaluations"]["top1"][-1] for run in runs], ".4f"),
            reached([epochs_to(run, target) for run, target in wanted], ".2f"),
            reached([seconds_to(run, target, processor=processor) for run, target in wanted], ".3g"),
            ", ".join(milliseconds(runs, refresh=refresh, processor=processor) for refresh in (False, True)),
            _refreshed(runs),
        )
        rows.append(cells)
    times = f"Times are {time_unit(processor=processor)}, without evaluations."
    return "\n".join([markdown.table(heads, rows), "", times, "", paper.table(paper.CURVES)])


def _refreshed(runs: list[dict[str, Any]]) -> str:
    decisions = [decision for run in runs for decision in run["refreshes"]["decision"]]
    return f"{decisions.count('update')} of {len(decisions)}" if decisions else "none"


def draw(raw: RawData, path: Path) -> None:
    """Draw loss and accuracy, the mean over seeds with the range behind it."""
    from matplotlib.figure import Figure as Picture  # imported here because it is slow to import

    picture = Picture(figsize=(11, 7.6), layout="constrained")
    axes = picture.subplots(2, 2, sharey="row")
    processor = processor_time_counts(raw.settings, raw.machine)
    for name in raw.settings["settings"]:
        runs, colour, style = raw.chosen(setting=name), COLOURS[name], STYLES.get(name, "-")
        for row, (points, value) in enumerate((("steps", "loss"), ("evaluations", "top1"))):
            series = [run[points][value] for run in runs]
            if value == "loss":
                series = [running_mean(losses, SMOOTHED) for losses in series]
            steps = runs[0][points]["step"]
            epochs = [step / runs[0]["steps_per_epoch"] for step in steps]
            clocks = [seconds_of(run, processor=processor) for run in runs]
            seconds = [statistics.fmean(clock[step - 1] for clock in clocks) for step in steps]
            draw_band(axes[row][0], epochs, series, label=name, colour=colour, style=style)
            draw_band(axes[row][1], seconds, series, label=name, colour=colour, style=style)
    for column, unit in enumerate(("epochs", time_unit(processor=processor))):
        axes[0][column].set(yscale="log", ylabel=f"training loss, mean of {SMOOTHED + 1} steps")
        axes[1][column].set(xlabel=unit, ylabel="test accuracy, top-1")
        for row in (0, 1):
            axes[row][column].grid(alpha=0.3)
            axes[row][column].legend()
    write_title(picture, raw, raw.machine["device"], "mean and range of ")
    note(picture, f"Theirs, another task: {paper.CURVES_NOTE}")
    save(picture, path)


CURVES = Figure(
    about="training loss and test accuracy against epochs and seconds: momentum, THOR, THOR_stop, THOR_NT",
    takes=("data", "epochs", "eval_interval", "seeds"),
    settings=settings,
    jobs=jobs,
    measure=measure,
    draw=draw,
    table=table,
)
