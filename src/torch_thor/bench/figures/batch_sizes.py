"""A table of SGD with momentum and THOR at several batch sizes and a fixed number of epochs.

For both, the learning rate is the tuned one of the recipe times √(batch size / batch size of the recipe), which keeps
the scale of the noise of a step (Krizhevsky 2014; Hoffer et al. 2017). The update interval of THOR and the interval
between evaluations are the same number of images at every batch size. Nothing is tuned at the other batch sizes.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from torch_thor.bench import markdown
from torch_thor.bench.drawing import COLOURS, draw_band, note, save
from torch_thor.bench.figures import paper
from torch_thor.bench.figures.figure import Figure, Options, recipe_of
from torch_thor.bench.figures.measuring import recipe_settings, train_run
from torch_thor.bench.figures.raw import RawData
from torch_thor.bench.figures.run_times import epochs_to, processor_time_counts, seconds_of
from torch_thor.bench.markdown import reached, summary
from torch_thor.training.errors import require

OPTIMIZERS = {"momentum": "sgd", "thor": "thor"}
SEEDS = (0,)
SIZES = (32, 64, 128, 256, 512, 1024)
RULE = "lr of the recipe times the square root of batch size over the recipe's"


def settings(options: Options, device: str) -> dict[str, Any]:
    """Return the settings of the figure."""
    recipe = recipe_settings(recipe_of(options, [*OPTIMIZERS.values()]), [*OPTIMIZERS.values()])
    interval = recipe["optimizers"]["thor"]["update_interval"]
    require(
        isinstance(interval, int),
        f"update_interval={interval} cannot be scaled with the batch: give the recipe a number of steps",
    )
    return {
        "recipe": recipe,
        "device": device,
        "seeds": options.seeds or SEEDS,
        "batch_sizes": options.batch_sizes or SIZES,
        "rule": RULE,
    }


def jobs(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of the table, the largest batch first, so that an error for lack of memory comes early."""
    return [
        {"optimizer": name, "batch_size": size, "seed": seed}
        for seed in settings["seeds"]
        for size in sorted(settings["batch_sizes"], reverse=True)
        for name in OPTIMIZERS
    ]


def scaled(recipe: Mapping[str, Any], optimizer: str, batch_size: int) -> dict[str, Any]:
    """Return the settings of a recipe that depend on the batch size."""
    own, share = recipe["optimizers"][optimizer], batch_size / recipe["batch_size"]
    words = {"batch_size": batch_size, "lr": float(f"{own['lr'] * math.sqrt(share):.6g}")}
    if recipe["eval_interval"] is not None:
        words["eval_interval"] = max(1, round(recipe["eval_interval"] / share))
    if "update_interval" in own:
        words["update_interval"] = max(1, round(own["update_interval"] / share))
    return words


def measure(settings: Mapping[str, Any], job: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Train once. A training that diverges counts as a result."""
    optimizer = OPTIMIZERS[job["optimizer"]]
    own = scaled(settings["recipe"], optimizer, job["batch_size"])
    words = [f"seed={job['seed']}", *(f"{key}={value}" for key, value in own.items())]
    label = f"{job['optimizer']}, batch {job['batch_size']}, seed {job['seed']}"
    return {"scaled": own, **train_run(settings, optimizer, words, console, label=label, may_diverge=True).plain()}


def _targets(raw: RawData) -> list[float]:
    """Return the targets of the recipe that at least one run reaches."""
    best = max((top1 for run in raw.runs for top1 in run["evaluations"]["top1"]), default=0.0)
    return [target for target in raw.settings["recipe"]["targets"] if target <= best]


def table(raw: RawData) -> str:
    """Return a table of the accuracy and of the epochs to the recipe's targets at each batch size."""
    targets, processor = _targets(raw), processor_time_counts(raw.settings, raw.machine)
    heads = ["batch size", "optimizer", "lr", "steps", "final accuracy"]
    heads += [f"epochs (steps) to {target:.1%}" for target in targets] + [
        f"{'processor ' if processor else ''}seconds of training steps"
    ]
    rows = []
    for size in sorted(raw.settings["batch_sizes"]):
        for name in OPTIMIZERS:
            runs = raw.chosen(optimizer=name, batch_size=size)
            cells = [str(size), name, f"{runs[0]['scaled']['lr']:.3g}", str(max(len(r["steps"]["step"]) for r in runs))]
            failed = [run["failure"] for run in runs if run["failure"] is not None]
            if failed:
                rows.append([*cells, failed[0].partition(":")[0], *["-"] * (len(targets) + 1)])
                continue
            cells.append(summary([run["evaluations"]["top1"][-1] for run in runs], ".4f"))
            for target in targets:
                epochs = [epochs_to(run, target) for run in runs]
                known = [value for value in epochs if value is not None]
                steps = round(statistics.fmean(known) * runs[0]["steps_per_epoch"]) if len(known) == len(runs) else None
                cells.append(reached(epochs, ".2f") + ("" if steps is None else f" ({steps})"))
            cells.append(summary([seconds_of(run, processor=processor)[-1] for run in runs], ".3g"))
            rows.append(cells)
    rule = f"Rule: {raw.settings['rule']}; nothing is tuned at the other sizes."
    return "\n".join([markdown.table(heads, rows), "", rule, "", paper.table(paper.BATCH_SIZES)])


def draw(raw: RawData, path: Path) -> None:
    """Draw final accuracy, and epochs to the recipe's lowest target, against the batch size."""
    from matplotlib.figure import Figure as Picture  # imported here because it is slow to import

    targets = _targets(raw)[:1]
    values: dict[str, Callable[[Mapping[str, Any]], float | None]] = {"final accuracy, top-1": _final}
    for target in targets:
        values[f"epochs to {target:.1%}; no point: not every seed"] = partial(epochs_to, target=target)
    picture = Picture(figsize=(5 * len(values), 4.4), layout="constrained")
    panels = picture.subplots(1, len(values), squeeze=False, sharex=True)[0]
    sizes = sorted(raw.settings["batch_sizes"])
    for axes, (label, value) in zip(panels, values.items(), strict=True):
        for name in OPTIMIZERS:
            of_size = {size: [value(run) for run in raw.chosen(optimizer=name, batch_size=size)] for size in sizes}
            whole = {size: found for size, found in of_size.items() if None not in found}
            series = list(zip(*whole.values(), strict=True))
            if series:
                draw_band(axes, list(whole), series, label=name, colour=COLOURS[name], marker="o")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set(xlabel="batch size", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()
    recipe, seeds = raw.settings["recipe"], len(raw.settings["seeds"])
    picture.suptitle(
        f"{recipe['data']['name']}, {recipe['model']}, epochs: {recipe['epochs']}, lr ~ √batch; "
        f"{seeds} seed{'s' if seeds > 1 else ''}",
        fontsize=10,
    )
    note(picture, f"Theirs, another task: {paper.BATCH_NOTE}")
    save(picture, path)


def _final(run: Mapping[str, Any]) -> float | None:
    return None if run["failure"] is not None else float(run["evaluations"]["top1"][-1])


BATCH_SIZES = Figure(
    about="a table over batch sizes: final accuracy and epochs to the recipe's targets, momentum and THOR",
    takes=("data", "epochs", "eval_interval", "seeds", "batch_sizes"),
    settings=settings,
    jobs=jobs,
    measure=measure,
    draw=draw,
    table=table,
)
