"""A table of SGD with momentum and THOR_NT at several batch sizes and a fixed number of epochs.

For both, the learning rate is that of the recipe times √(batch size / batch size of the recipe),
which keeps the scale of the noise of a step (Krizhevsky 2014; Hoffer et al. 2017). The update
interval of THOR and the interval between evaluations are the same number of images at every batch
size. Nothing is tuned at the other batch sizes.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import training
from benchmarks.figures.training import (
    Options,
    Row,
    clock_of,
    finals,
    grouped,
    measured,
    reach,
    to_target,
)
from benchmarks.runner import markdown
from benchmarks.runner.drawing import draw_band, label_in_full, legend_below, save
from torch_thor.errors import require
from torch_thor.training.optimizers import settings_of
from torch_thor.training.recipes import load_recipe

ABOUT = (
    "a table over batch sizes: final accuracy and epochs to the recipe's targets, momentum, THOR_NT"
)
TAKES = ("data", "epochs", "eval_interval", "seeds", "batch_sizes")
QUICK = ("epochs=1", "eval_interval=117")
SIZES, OPTIMIZERS = (32, 128, 512), {"momentum": "sgd", "thor_nt": "thor"}
TEXT = (
    "The learning rate is the recipe's times √(batch size / the recipe's); nothing is tuned at the "
    "other sizes.\n\nTheirs, not ours, and another task: THOR trains ResNet-50 on ImageNet to 75.9 "
    "% in 66.7, 4.1 and 2.7 min at the batch sizes 256, 4096 and 8192, on 8, 128 and 256 Ascend "
    "910 (Chen et al. 2021; MindSpore's introduction to THOR)."
)


def jobs(options: Options, device: str) -> list[Row]:
    """List the trainings, largest batch first, so that lack of memory shows early."""
    recipe = training.words_of(options, training.FASHION, QUICK)
    sizes = sorted(options.get("batch_sizes", SIZES), reverse=True)
    settings = [
        ({"setting": name, "batch_size": size}, optimizer, scaled(recipe, optimizer, size))
        for size in sizes
        for name, optimizer in OPTIMIZERS.items()
    ]
    return training.jobs_of(recipe, options, device, settings)


def scaled(recipe: tuple[str, list[str]], optimizer: str, size: int) -> list[str]:
    """Return the words of a recipe that depend on the batch size."""
    base = load_recipe(recipe[0], [f"optimizer={optimizer}", *recipe[1]])
    own, share = (
        {**settings_of(optimizer), **base.optimizers.get(optimizer, {})},
        size / base.batch_size,
    )
    intervals = {"eval_interval": base.eval_interval, "update_interval": own.get("update_interval")}
    for name, interval in intervals.items():
        whole = (
            f"{name}={interval} cannot be scaled with the batch: give the recipe a number of steps"
        )
        require(interval is None or isinstance(interval, int), whole)
    words = [
        f"{name}={max(1, round(of / share))}" for name, of in intervals.items() if of is not None
    ]
    if optimizer == "thor":
        words.append("trace_thresholds=thor_nt")
    return [f"batch_size={size}", f"lr={own['lr'] * math.sqrt(share):.6g}", *words]


run, optimizers = measured, training.optimizers


def table(rows: Sequence[Row]) -> str:
    """Return the accuracy and the epochs to targets at each batch size.

    The targets are those of the recipe that a run reaches.
    """
    targets = [
        one
        for one in rows[0]["job"]["recipe"].get("targets", [])
        if any(reach(row, one) for row in rows)
    ]
    heads = [
        "batch size",
        "setting",
        "lr",
        "steps",
        rows[0]["metric"],
        *(f"epochs to {one:.1%}" for one in targets),
    ]
    lines = []
    for (size, setting), own in sorted(
        grouped(rows, lambda job: (job["batch_size"], job["setting"])).items()
    ):
        lr = own[0]["job"]["recipe"]["optimizers"][OPTIMIZERS[setting]]["lr"]
        epochs = [to_target(own, [target] * len(own), ".2f", "epochs") for target in targets]
        seconds = markdown.summary([row["seconds"] for row in own], ".3g")
        lines.append(
            [str(size), setting, f"{lr:.3g}", str(own[0]["steps"]), finals(own), *epochs, seconds]
        )
    return f"{markdown.table([*heads, f'{clock_of(rows)} of all steps'], lines)}\n\n{TEXT}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the final metric against the batch size."""
    from matplotlib.figure import Figure  # slow to import

    picture = Figure(figsize=(6, 4.4), layout="constrained")
    axes = picture.subplots()
    for setting, own in grouped(rows, lambda job: job["setting"]).items():
        of_size = sorted(grouped(own, lambda job: job["batch_size"]).items())
        ends = [
            (size, [row["value"] for row in of])
            for size, of in of_size
            if not any(row["failure"] for row in of)
        ]
        if ends:
            xs, values = zip(*ends, strict=True)
            draw_band(axes, xs, [*zip(*values, strict=True)], label=setting)
    sizes = sorted({row["job"]["batch_size"] for row in rows})
    axes.set_xscale("log", base=2)
    label_in_full(axes)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="batch size", ylabel=f"held-out {rows[0]['metric']}")
    axes.grid(alpha=0.3)
    legend_below(picture, [axes])
    save(picture, path)
