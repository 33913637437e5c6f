"""Number of steps to the final accuracy of tuned SGD: Fashion-MNIST, small ResNet, batch size 128, 2 epochs.

    python benchmarks/fashion_mnist.py                # runs what is missing in results/fashion_mnist, prints the table
    python benchmarks/fashion_mnist.py --table        # prints the table from the raw data only

Protocol. For each optimizer five learning rates, a factor of two apart, are tried with a seed that is used for
nothing else (10). The one with the best final accuracy is then run with seeds 0, 1 and 2. All other settings are those
of the recipe ``fashion-mnist``. A seed determines the initial weights and the order of the data, which are the same
for every optimizer. The target of a seed is SGD's final test accuracy with that seed. The result is the step of the
first evaluation (one every 52 steps) at which an optimizer reaches the target, divided by SGD's number of steps.

The benchmark does not search over anything but the learning rate, and it uses neither a wide network nor a long
training. The seconds in the raw data depend on the load of the machine; step_time.py measures the time of a step.
"""

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_thor.bench import (
    TUNING_SEED,
    Folder,
    Search,
    drawing,
    final_accuracy,
    markdown,
    running_mean,
    script,
    stages,
    steps_to,
    write_tables,
)

STORE = Folder(Path(__file__).parent / "results" / "fashion_mnist")
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "fashion_mnist.png"
GRIDS = {
    "thor": [0.0125, 0.025, 0.05, 0.1, 0.2],
    "thor-paper": [0.0125, 0.025, 0.05, 0.1, 0.2],
    "sgd": [0.025, 0.05, 0.1, 0.2, 0.4],
    "muon": [0.0025, 0.005, 0.01, 0.02, 0.04],
    "adamw": [0.001, 0.002, 0.004, 0.008, 0.016],
}
# What a name stands for where it is not a recipe's optimizer: the optimizer, and what is overridden.
VARIANTS = {"thor-paper": ("thor", ["optimizers.thor.max_update_ratio=null"])}  # no bound on the step
EVAL_INTERVAL = 52
SMOOTHED = 25  # steps before each one that its loss is averaged with in the picture


@dataclass(frozen=True)
class Training:
    """One run.

    Args:
        optimizer: key of ``GRIDS``.
        lr: learning rate.
        seed: seed; the tuning seed is evaluated at the end alone.
    """

    optimizer: str
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """Name of its raw data."""
        return f"{self.optimizer}-lr{self.lr:g}-seed{self.seed}"

    def run(self) -> dict[str, Any]:
        """Train."""
        from torch_thor.bench import train_recipe

        interval = 10**6 if self.seed == TUNING_SEED else EVAL_INTERVAL
        name, changed = VARIANTS.get(self.optimizer, (self.optimizer, []))
        words = [f"lr={self.lr}", f"seed={self.seed}", f"eval_interval={interval}", "device=cpu", *changed]
        return {**asdict(self), **train_recipe("fashion-mnist", name, words)[2]}

    def result(self) -> dict[str, Any]:
        """Return the raw data."""
        return STORE.read(self.key)

    def final(self) -> float:
        """Return the accuracy at the last step; 0 for a run that did not get there."""
        return final_accuracy(self.result())


def search(optimizer: str) -> Search[Training]:
    """Return the search for the learning rate of an optimizer."""
    return Search([Training(optimizer, lr, TUNING_SEED) for lr in GRIDS[optimizer]], Training.final)


def searches() -> list[Search[Training]]:
    """List all searches."""
    return [search(optimizer) for optimizer in GRIDS]


def there(optimizer: str) -> list[Training]:
    """List the runs of the other seeds that there are."""
    return [run for run in search(optimizer).chosen() if STORE.holds(run.key)]


def table() -> str:
    """Return the result as Markdown, from the seeds there are, and write it with the figures as JSON."""
    targets = {run.seed: run.final() for run in search("sgd").chosen()}
    heads = (
        "optimizer",
        "lr (of 5)",
        "final accuracy, median (each seed)",
        "steps to SGD's final accuracy, share of SGD's, median (each seed)",
    )
    rows, figures = [], {}
    for optimizer in GRIDS:
        runs, shares = there(optimizer), []
        for run in runs:
            evaluations = [(step, top1) for step, top1, _ in run.result()["evaluations"]]
            reached = steps_to(evaluations, targets[run.seed], interpolate=False)
            shares.append(float("inf") if reached is None else reached / run.result()["steps"])
        finals = [run.final() for run in runs]
        rows.append((optimizer, f"{runs[0].lr:g}", markdown.middle(finals, ".4f"), markdown.middle(shares, ".2f")))
        figures[optimizer] = {"lr": runs[0].lr, "final": finals, "share_of_sgd_steps": shares}
    text = markdown.table(heads, rows)
    write_tables(STORE.folder, text, {"targets": targets, "optimizers": figures})
    return text


def draw(path: Path) -> None:
    """Draw accuracy and loss against steps, the median over seeds with the range behind it."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for optimizer in GRIDS:
        runs = [run.result() for run in there(optimizer)]
        steps = [step for step, _, _ in runs[0]["evaluations"]]
        series = [[top1 for _, top1, _ in run["evaluations"]] for run in runs]
        drawing.draw_band(left, steps, series, label=optimizer, middle=statistics.median)
        losses = [statistics.fmean(values) for values in zip(*(run["loss"] for run in runs), strict=True)]
        right.plot(range(1, len(losses) + 1), running_mean(losses, SMOOTHED), label=optimizer)
    target = statistics.median(run.final() for run in search("sgd").chosen())
    left.axhline(target, color="grey", linewidth=0.8, linestyle="--")
    left.set(xlabel="step", ylabel="test accuracy", ylim=(0.78, 0.93), title="Fashion-MNIST, small ResNet, batch 128")
    left.legend(loc="lower right")
    right.set(xlabel="step", ylabel=f"training loss, mean of {SMOOTHED} steps", yscale="log")
    drawing.save(figure, path)


def main() -> None:
    """Run what is missing, print the table and draw the curves."""
    parser = script.parser(__doc__)
    parser.add_argument("--plot", type=Path, default=PICTURE, help="where the curves go")
    options = parser.parse_args()
    if not options.table:
        script.measure(STORE, stages(searches), options.workers)
    print(table())
    draw(options.plot)


if __name__ == "__main__":
    main()
