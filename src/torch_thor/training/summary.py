"""A run's report: each optimizer's results as table, sentence, `summary.json` and `curves.png`."""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from torch_thor.files import write_text
from torch_thor.printing import columns, milliseconds, printer
from torch_thor.training.folder import RunFolder
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.tasks.task import Metric, Task, primary

SMOOTHING = 0.9  # decay of the running average of the training loss


def report(folder: RunFolder, recipe: Recipe, task: Task, console: Console) -> None:
    """Print the results of a run, and write them to its folder."""
    results = [
        Result(name, folder.metrics(name), primary(task.metrics)) for name in recipe.optimizer
    ]
    write_text(
        folder.summary,
        json.dumps([as_json(result, recipe, task.unit) for result in results], indent=2) + "\n",
    )
    console.print(table(results, recipe))
    draw_curves(results, folder.curves, f"{recipe.name}: {recipe.model}")
    printer(console)(f"Curves, metrics, recipe and checkpoints are in {folder.path}")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a `metrics.jsonl`, without an incomplete last line of a killed run."""
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.endswith("\n"))


class Result:
    """What one optimizer has reached, as its `metrics.jsonl` says."""

    def __init__(self, name: str, path: Path, metric: Metric) -> None:
        self.name = name
        self.metric = metric
        self.lr = 0.0  # the largest
        self.evaluations: list[dict[str, Any]] = []
        self.curve: list[tuple[int, float, float]] = []  # step, seconds, smoothed loss
        # How often the trace rule decided what, by layer
        self.decisions: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.ordinary: list[float] = []  # durations of steps without a refresh
        self.refresh: list[float] = []
        self.sums: dict[str, float] = dict.fromkeys(("duration", "waited", "terms", "skipped"), 0)
        for line in read(path):
            if line["kind"] == "eval":
                self.evaluations.append(line)
            elif line["kind"] == "refresh":
                self.decisions[line["layer"]][line["decision"]] += 1
            else:
                (self.refresh if line["refresh"] else self.ordinary).append(line["duration"])
                self.lr = max(self.lr, line["lr"])
                for key in self.sums:
                    self.sums[key] += line[key]
                if (loss := line["loss"]) is not None:  # a skipped step's may not be finite
                    before = self.curve[-1][2] if self.curve else loss
                    smoothed = SMOOTHING * before + (1 - SMOOTHING) * loss
                    self.curve.append((line["step"], line["seconds"], smoothed))

    @property
    def final(self) -> dict[str, Any]:
        """The last evaluation."""
        return self.evaluations[-1]

    def value(self, line: dict[str, Any]) -> float:
        """The primary metric of an evaluation, of the averaged weights if there are any."""
        value = line.get(f"averaged_{self.metric.name}")
        value = line[self.metric.name] if value is None else value
        return math.nan if value is None else float(value)

    def best(self) -> dict[str, Any]:
        """The first evaluation with the best value."""
        return reduce(
            lambda best, line: (
                line if self.metric.better(self.value(line), self.value(best)) else best
            ),
            self.evaluations,
        )

    def reaching(self, target: float) -> dict[str, Any] | None:
        """The first evaluation whose value is a target or better."""
        return next(
            (line for line in self.evaluations if not self.metric.better(target, self.value(line))),
            None,
        )


def targets_of(recipe: Recipe) -> list[float]:
    """The values of the primary metric whose steps are reported, in order."""
    return sorted({*recipe.targets, *([] if recipe.stop_at is None else [recipe.stop_at])})


def as_json(result: Result, recipe: Recipe, unit: str) -> dict[str, Any]:
    """Return the results of an optimizer as JSON values."""
    best, sums = result.best(), result.sums
    value = result.value(best)
    reached = {target: result.reaching(target) for target in targets_of(recipe)}
    return {
        "optimizer": result.name,
        "steps": result.final["step"],
        **{
            key: value
            for key, value in result.final.items()
            if key not in ("kind", "step", "primary", "higher_is_better")
        },
        "best": {
            "step": best["step"],
            result.metric.name: None if math.isnan(value) else value,
        },
        "stop_at": recipe.stop_at,
        "ended_at_target": recipe.stop_at is not None and reached[recipe.stop_at] is result.final,
        "targets": {
            str(target): line and {"steps": line["step"], "seconds": line["seconds"]}
            for target, line in reached.items()
        },
        f"{unit}_per_second": sums["terms"] / sums["duration"],
        "waiting_for_data": sums["waited"] / sums["duration"],
        "skipped_steps": sums["skipped"],
        "ordinary_step_seconds": median(result.ordinary) if result.ordinary else None,
        "refresh_step_seconds": median(result.refresh) if result.refresh else None,
        "decisions": result.decisions,
    }


def table(results: Sequence[Result], recipe: Recipe) -> Table:
    """Make the final table, with a column for each optimizer."""
    metric = results[0].metric
    rows = [["highest learning rate", *(f"{result.lr:g}" for result in results)]]
    for target in sorted(targets_of(recipe), reverse=not metric.higher_is_better):
        # a target such as 75.97 % is not rounded
        text = f"{100 * target:.6g}%" if metric.share else f"{target:.6g}"
        rows.append(
            [
                f"steps to {metric.word} {text}",
                *(_when(result.reaching(target)) for result in results),
            ]
        )
    goal, whose = goal_of(results)
    if len(results) > 1 and not math.isnan(goal):
        reached = (_when(result.reaching(goal)) for result in results)
        rows.append([f"steps to {whose}'s end, {metric.text(goal)}", *reached])
    rows += [
        [
            f"final {metric.word}{'' if recipe.ema_decay is None else ' of averaged weights'}",
            *(metric.text(result.value(result.final)) for result in results),
        ],
        ["steps in total", *(_when(result.final) for result in results)],
        ["median step / refresh step", *map(_durations, results)],
    ]
    return columns("Result", ["", *(result.name for result in results)], rows, left=1)


def goal_of(results: Sequence[Result]) -> tuple[float, str]:
    """Return what AdamW, or the last optimizer, ends with, and its name."""
    reference = next((result for result in results if result.name == "adamw"), results[-1])
    return reference.value(reference.final), reference.name


def _durations(result: Result) -> str:
    return " / ".join(
        milliseconds(median(kind)) for kind in (result.ordinary, result.refresh) if kind
    )


def _when(line: dict[str, Any] | None) -> str:
    return "not reached" if line is None else f"{line['step']} ({line['seconds']:.1f} s)"


def draw_curves(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw training loss and primary metric of all optimizers against steps and seconds.

    A star marks where an optimizer reaches what AdamW, or the last optimizer, ends with.
    """
    # matplotlib cannot be imported if a notebook or an old profile names a backend it does not have
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib import style  # slow to import
    from matplotlib.figure import Figure  # without pyplot, which may open windows

    own = {
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.formatter.min_exponent": 5,  # ticks such as 0.5, not 5 x 10^-1
    }
    with style.context(["default", own]):  # the user's matplotlibrc may ask for LaTeX
        figure = Figure(figsize=(11, 7), layout="constrained")
        figure.suptitle(title)
        goal, _ = goal_of(results)
        panels = figure.subplots(2, 2, sharex="col", sharey="row")
        for column, (key, unit) in enumerate(
            {"step": "steps", "seconds": "seconds of training"}.items()
        ):
            losses, metrics = panels[:, column]
            losses.set(yscale="log", ylabel="training loss, smoothed")
            metrics.set(xlabel=unit, ylabel=f"held-out {results[0].metric.title}")
            for result in results:
                losses.plot(
                    [point[column] for point in result.curve],
                    [point[2] for point in result.curve],
                    label=f"{result.name}, lr {result.lr:g}",
                )
                there = result.reaching(goal)
                metrics.plot(
                    [line[key] for line in result.evaluations],
                    [result.value(line) for line in result.evaluations],
                    marker="*",
                    markersize=12,
                    markevery=[result.evaluations.index(there)] if there else [],
                )
        figure.legend(
            *panels[0, 0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=4,
            frameon=False,
        )
        figure.savefig(path, dpi=120)
