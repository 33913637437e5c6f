"""Steps to the accuracy that tuned SGD ends with: Fashion-MNIST, small ResNet, batch 128, 2 epochs.

    python benchmarks/fashion_mnist.py                # what is missing under results/fashion_mnist, then the table
    python benchmarks/fashion_mnist.py --table        # the table alone, from the raw data

Protocol. Each optimizer has five learning rates, a factor of two apart, tried with one seed that is used for
nothing else (10); the one with the best final accuracy runs with seeds 0, 1 and 2. All other settings are those of the
recipe ``fashion-mnist``. A seed decides the initial weights and the order of the data, the same for every optimizer.
The target of a seed is SGD's final test accuracy in that seed; the figure is the first evaluation (every 52 steps) at
which an optimizer reaches it, over SGD's number of steps.

What it is not: a search over anything but the learning rate, a wide network, or a long training. The seconds in the raw
data depend on what else the machine did: for the cost of a step see step_time.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "fashion_mnist"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "fashion_mnist.png"
GRIDS = {
    "thor": [0.0125, 0.025, 0.05, 0.1, 0.2],
    "thor-paper": [0.0125, 0.025, 0.05, 0.1, 0.2],
    "sgd": [0.025, 0.05, 0.1, 0.2, 0.4],
    "muon": [0.0025, 0.005, 0.01, 0.02, 0.04],
    "adamw": [0.001, 0.002, 0.004, 0.008, 0.016],
}
# What a name stands for where it is not a recipe's optimizer: the optimizer, and what is overridden.
VARIANTS = {"thor-paper": ("thor", ["optimizers.thor.kl_clip=null"])}  # no bound on the step
TUNING_SEED = 10
SEEDS = (0, 1, 2)
EVAL_INTERVAL = 52


def run_file(optimizer: str, lr: float, seed: int) -> Path:
    """Return where a run's raw data stands.

    Args:
        optimizer: its name.
        lr: learning rate.
        seed: seed.

    Returns:
        A path.
    """
    return RESULTS / f"{optimizer}-lr{lr:g}-seed{seed}.json"


def train_one(optimizer: str, lr: float, seed: int) -> None:
    """Train once, in this process on one thread, and write the raw data.

    Args:
        optimizer: its name.
        lr: learning rate.
        seed: seed; the tuning seed is evaluated at the end alone.
    """
    import torch

    from machine import describe
    from torch_thor.training.config.recipe import load_recipe, recipe_yaml
    from torch_thor.training.data.in_memory import load_data
    from torch_thor.training.engine.loop import train
    from torch_thor.training.errors import UserError
    from torch_thor.training.experiment import image_run as new_run

    torch.set_num_threads(1)
    interval = 10**6 if seed == TUNING_SEED else EVAL_INTERVAL
    name, changed = VARIANTS.get(optimizer, (optimizer, []))
    overrides = [f"optimizer={name}", f"lr={lr}", f"seed={seed}", f"eval_interval={interval}", "device=cpu", *changed]
    recipe = load_recipe("fashion-mnist", overrides)
    run = new_run(recipe, name, load_data(recipe.data))
    failure = None
    try:
        train(run)
    except UserError as error:  # a learning rate at which the loss is no longer finite: a result, not an accident
        failure = str(error)
    record = run.record
    result = {
        "optimizer": optimizer,
        "lr": lr,
        "seed": seed,
        "steps": run.total_steps,
        "failure": failure,
        "evaluations": [[e.step, e.top1, round(e.seconds, 2)] for e in record.evaluations],
        "loss": [round(point.loss, 5) for point in record.steps],
        "seconds_ordinary_step": record.median_duration(refresh=False),
        "seconds_refresh_step": record.median_duration(refresh=True),
        "machine": describe(threads=1),
        "recipe": recipe_yaml(recipe),
    }
    path = run_file(optimizer, lr, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result) + "\n")
    temporary.rename(path)


def complete(jobs: list[tuple[str, float, int]], workers: int) -> None:
    """Run the jobs whose raw data is missing, each in a process of its own.

    Args:
        jobs: optimizer, learning rate, seed.
        workers: how many at a time.
    """
    missing = [job for job in jobs if not run_file(*job).exists()]

    def start(job: tuple[str, float, int]) -> None:
        words = [sys.executable, __file__, "--one", *(str(part) for part in job)]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        print("done", *job, flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(start, missing))


def load(optimizer: str, lr: float, seed: int) -> dict[str, Any]:
    """Return a run's raw data.

    Args:
        optimizer: its name.
        lr: learning rate.
        seed: seed.

    Returns:
        What :func:`train_one` wrote.
    """
    result: dict[str, Any] = json.loads(run_file(optimizer, lr, seed).read_text())
    return result


def final(run: dict[str, Any]) -> float:
    """Return the accuracy at the last step; 0 for a run that did not get there.

    Args:
        run: raw data.

    Returns:
        Test accuracy.
    """
    return 0.0 if run["failure"] else float(run["evaluations"][-1][1])


def best_lr(optimizer: str) -> float:
    """Return the learning rate with the best final accuracy in the tuning seed.

    Args:
        optimizer: its name.

    Returns:
        The learning rate.
    """
    return max(GRIDS[optimizer], key=lambda lr: final(load(optimizer, lr, TUNING_SEED)))


def done(optimizer: str) -> list[int]:
    """Return the seeds that an optimizer has run with its best learning rate.

    Args:
        optimizer: its name.

    Returns:
        All of ``SEEDS`` once the script has come to its end.
    """
    return [seed for seed in SEEDS if run_file(optimizer, best_lr(optimizer), seed).exists()]


def table() -> str:
    """Return the result as Markdown, from the seeds there are, and write it with the figures as JSON.

    Returns:
        The table.
    """
    targets = {seed: final(load("sgd", best_lr("sgd"), seed)) for seed in SEEDS}
    lines = [
        "| optimizer | lr (of 5) | final accuracy, median (each seed) | steps to SGD's final accuracy, share of SGD's, "
        "median (each seed) |",
        "|---|---|---|---|",
    ]
    figures = {}
    for optimizer in GRIDS:
        lr = best_lr(optimizer)
        runs = {seed: load(optimizer, lr, seed) for seed in done(optimizer)}
        shares = []
        for seed, run in runs.items():
            reached = next((step for step, top1, _ in run["evaluations"] if top1 >= targets[seed]), None)
            shares.append(reached / run["steps"] if reached else float("inf"))
        finals = [final(run) for run in runs.values()]
        each_final = ", ".join(f"{f:.4f}" for f in finals)
        each_share = ", ".join("never" if s == float("inf") else f"{s:.2f}" for s in shares)
        middle = statistics.median(shares)
        lines.append(
            f"| {optimizer} | {lr:g} | {statistics.median(finals):.4f} ({each_final}) | "
            f"{'never' if middle == float('inf') else f'{middle:.2f}'} ({each_share}) |"
        )
        figures[optimizer] = {"lr": lr, "final": finals, "share_of_sgd_steps": [None if s > 1 else s for s in shares]}
    text = "\n".join(lines)
    (RESULTS / "table.md").write_text(text + "\n")
    (RESULTS / "table.json").write_text(json.dumps({"targets": targets, "optimizers": figures}, indent=1) + "\n")
    return text


def draw(path: Path) -> None:
    """Draw accuracy and loss against steps, the median over seeds with the range behind it.

    Args:
        path: a PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from torch_thor.training.figures.drawing import draw_band, running_mean

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for optimizer in GRIDS:
        runs = [load(optimizer, best_lr(optimizer), seed) for seed in done(optimizer)]
        steps = [step for step, _, _ in runs[0]["evaluations"]]
        series = [[top1 for _, top1, _ in run["evaluations"]] for run in runs]
        draw_band(left, steps, series, label=optimizer, middle=statistics.median)
        losses = [statistics.fmean(values) for values in zip(*(run["loss"] for run in runs), strict=True)]
        window = 25
        right.plot(range(1, len(losses) + 1), running_mean(losses, window), label=optimizer)
    target = statistics.median(final(load("sgd", best_lr("sgd"), seed)) for seed in SEEDS)
    left.axhline(target, color="grey", linewidth=0.8, linestyle="--")
    left.set(xlabel="step", ylabel="test accuracy", ylim=(0.78, 0.93), title="Fashion-MNIST, small ResNet, batch 128")
    left.legend(loc="lower right")
    right.set(xlabel="step", ylabel=f"training loss, mean of {window} steps", yscale="log")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what is missing, print the table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table from the raw data")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time, one thread each")
    parser.add_argument("--plot", type=Path, default=PICTURE, help="where the curves go")
    parser.add_argument("--one", nargs=3, metavar=("OPTIMIZER", "LR", "SEED"), help="train once (used by this script)")
    options = parser.parse_args()
    if options.one:
        train_one(options.one[0], float(options.one[1]), int(options.one[2]))
        return
    if not options.table:
        complete([(o, lr, TUNING_SEED) for o, grid in GRIDS.items() for lr in grid], options.workers)
        complete([(o, best_lr(o), seed) for o in GRIDS for seed in SEEDS], options.workers)
    print(table())
    draw(options.plot)


if __name__ == "__main__":
    main()
