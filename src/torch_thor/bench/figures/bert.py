"""Accuracy on masked tokens against steps and seconds: LAMB, THOR and ThorMuon on the recipe `bert-tiny`."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from torch_thor.bench import markdown
from torch_thor.bench.drawing import COLOURS, draw_band, note, save
from torch_thor.bench.figures import paper
from torch_thor.bench.figures.figure import Figure, Options, recipe_of, write_title
from torch_thor.bench.figures.measuring import recipe_settings, train_run
from torch_thor.bench.figures.raw import RawData
from torch_thor.bench.figures.run_times import (
    milliseconds,
    processor_time_counts,
    seconds_of,
    seconds_to,
    step_to,
    time_unit,
)
from torch_thor.bench.markdown import reached, summary

BASELINE = "lamb"
OPTIMIZERS = (BASELINE, "thor", "thor-muon")
SEEDS = (0, 1, 2)
RECIPE = "bert-tiny"
ACCURACY = "mlm_accuracy"


def settings(options: Options, device: str) -> dict[str, Any]:
    """Choose the settings of the figure."""
    recipe = recipe_settings(recipe_of(options, OPTIMIZERS, RECIPE), OPTIMIZERS)
    return {"recipe": recipe, "device": device, "seeds": options.seeds or SEEDS, "optimizers": list(OPTIMIZERS)}


def jobs(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of the figure, seed by seed."""
    return [{"optimizer": name, "seed": seed} for seed in settings["seeds"] for name in settings["optimizers"]]


def measure(settings: Mapping[str, Any], job: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Train once."""
    name, seed = job["optimizer"], job["seed"]
    return train_run(settings, name, [f"seed={seed}"], console, label=f"{name}, seed {seed}").plain()


def table(raw: RawData) -> str:
    """Final accuracy, and what it took to reach LAMB's."""
    targets = {run["job"]["seed"]: run["evaluations"][ACCURACY][-1] for run in raw.chosen(optimizer=BASELINE)}
    processor = processor_time_counts(raw.settings, raw.machine)
    heads = (
        "optimizer",
        "accuracy on masked tokens, mean ± standard deviation (each seed)",
        "perplexity",
        "accuracy of next-sentence prediction",
        "steps to LAMB's final accuracy of the same seed",
        "seconds to it",
        "an ordinary step (median)",
    )
    rows = []
    for name in raw.settings["optimizers"]:
        runs = raw.chosen(optimizer=name)
        wanted = [(run, targets[run["job"]["seed"]]) for run in runs]
        last = {key: [run["evaluations"][key][-1] for run in runs] for key in (ACCURACY, "perplexity", "nsp_accuracy")}
        rows.append(
            (
                name,
                summary(last[ACCURACY], ".4f"),
                summary(last["perplexity"], ".4g"),
                summary(last["nsp_accuracy"], ".3f"),
                reached([step_to(run, target) for run, target in wanted], ".0f"),
                reached([seconds_to(run, target, processor=processor) for run, target in wanted], ".3g"),
                milliseconds(runs, refresh=False, processor=processor),
            )
        )
    times = f"Times are {time_unit(processor=processor)}, without evaluations."
    theirs = paper.table(paper.BERT, paper.BERT_TASK, "masked tokens")
    return "\n".join([markdown.table(heads, rows), "", times, "", theirs])


def draw(raw: RawData, path: Path) -> None:
    """Draw the accuracy, the mean over seeds with the range behind it."""
    from matplotlib.figure import Figure as Picture  # slow to import, and no window is wanted

    picture = Picture(figsize=(11, 4.4), layout="constrained")
    by_steps, by_seconds = picture.subplots(1, 2, sharey=True)
    processor = processor_time_counts(raw.settings, raw.machine)
    for name in raw.settings["optimizers"]:
        runs = raw.chosen(optimizer=name)
        series = [run["evaluations"][ACCURACY] for run in runs]
        steps = runs[0]["evaluations"]["step"]
        clocks = [seconds_of(run, processor=processor) for run in runs]
        seconds = [statistics.fmean(clock[step - 1] for clock in clocks) for step in steps]
        draw_band(by_steps, steps, series, label=name, colour=COLOURS[name])
        draw_band(by_seconds, seconds, series, label=name, colour=COLOURS[name])
    by_steps.set(xlabel="step", ylabel="accuracy on masked tokens, held out")
    by_seconds.set(xlabel=time_unit(processor=processor))
    for axes in (by_steps, by_seconds):
        axes.grid(alpha=0.3)
        axes.legend()
    write_title(picture, raw, raw.machine["device"], "mean and range of ")
    note(picture, f"Theirs, another task: {paper.BERT_NOTE}")
    save(picture, path)


BERT = Figure(
    about="accuracy on masked tokens against steps and seconds: LAMB, THOR and ThorMuon on bert-tiny",
    takes=("epochs", "eval_interval", "seeds"),
    settings=settings,
    jobs=jobs,
    measure=measure,
    draw=draw,
    table=table,
)
