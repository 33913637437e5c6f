"""A run's report: each optimizer's results as table, sentence, `summary.json` and `curves.png`."""

import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from torch_thor.errors import explaining
from torch_thor.files import write_text, writing
from torch_thor.printing import columns, milliseconds, printer
from torch_thor.training.curves import draw_curves
from torch_thor.training.folder import RunFolder
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.tasks.task import Metric, Task, primary

TARGETS = 3  # rows of the table; with the three others it has six
CURVE = 2000  # points of a drawn curve, at least, if there were as many steps
SMOOTHING = 0.9  # decay of the running average of the training loss


def report(folder: RunFolder, recipe: Recipe, task: Task, console: Console) -> None:
    """Print the results of a run, and write them to its folder."""
    results = [
        Result(name, folder.metrics(name), primary(task.metrics)) for name in recipe.optimizer
    ]
    with writing(folder.curves):
        draw_curves(results, folder.curves)
    with writing(folder.summary):
        write_text(
            folder.summary,
            json.dumps([as_json(result, recipe, task.unit) for result in results], indent=2) + "\n",
        )
    console.print(table(results, recipe))
    if sentence := compared(results):
        printer(console)(sentence)
    printer(console)(f"Curves, metrics, recipe and checkpoints are in {folder.path}")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a `metrics.jsonl`, without an incomplete last one left by a killed run."""
    unreadable = explaining(
        (OSError, ValueError),
        lambda error: (
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): start again "
            "with --overwrite or --out"
        ),
    )
    with unreadable, path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


class Result:
    """What one optimizer has reached.

    Of each step in its `metrics.jsonl`, whatever its length, one number is held.
    """

    def __init__(self, name: str, path: Path, metric: Metric) -> None:
        self.name, self.metric = name, metric
        self.evaluations: list[dict[str, Any]] = []
        self.curve: list[tuple[int, float, float]] = []  # step, seconds, smoothed loss
        # Decisions of the trace rule are counted for each layer.
        self.decisions: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.ordinary, self.refresh = array("d"), array("d")  # durations
        self.waited = self.seconds = 0.0
        self.loss_terms = self.skipped = 0
        loss, stride = math.nan, 1
        for line in read(path):
            if line["kind"] == "eval":
                self.evaluations.append(line)
            elif line["kind"] == "refresh":
                self.decisions[line["layer"]][line["decision"]] += 1
            else:
                (self.refresh if line["refresh"] else self.ordinary).append(line["duration"])
                self.waited, self.seconds = (
                    self.waited + line["waited"],
                    self.seconds + line["duration"],
                )
                self.loss_terms, self.skipped = (
                    self.loss_terms + line["terms"],
                    self.skipped + line["skipped"],
                )
                if line["loss"] is not None:  # that of a skipped step may not be finite
                    loss = (
                        line["loss"]
                        if math.isnan(loss)
                        else SMOOTHING * loss + (1 - SMOOTHING) * line["loss"]
                    )
                if line["step"] % stride == 0:
                    self.curve.append((line["step"], line["seconds"], loss))
                if len(self.curve) == 2 * CURVE:
                    del self.curve[::2]
                    stride *= 2

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
        best = self.final
        for line in reversed(self.evaluations):
            best = best if self.metric.better(self.value(best), self.value(line)) else line
        return best

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
    final, best = result.final, result.best()
    value = result.value(best)
    reached = {str(target): result.reaching(target) for target in targets_of(recipe)}
    return {
        "optimizer": result.name,
        "steps": final["step"],
        **{
            key: value
            for key, value in final.items()
            if key not in ("kind", "step", "primary", "higher_is_better")
        },
        "best": {
            "step": best["step"],
            result.metric.name: None if math.isnan(value) else value,
        },
        "stop_at": recipe.stop_at,
        "ended_at_target": recipe.stop_at is not None and reached[str(recipe.stop_at)] is final,
        "targets": {
            key: line and {"steps": line["step"], "seconds": line["seconds"]}
            for key, line in reached.items()
        },
        f"{unit}_per_second": result.loss_terms / result.seconds,
        "waiting_for_data": result.waited / result.seconds,
        "skipped_steps": result.skipped,
        "ordinary_step_seconds": median(result.ordinary) if result.ordinary else None,
        "refresh_step_seconds": median(result.refresh) if result.refresh else None,
        "decisions": result.decisions,
    }


def table(results: Sequence[Result], recipe: Recipe) -> Table:
    """Make the final table of at most six rows, a column per optimizer; `summary.json` has more."""
    metric, targets = results[0].metric, targets_of(recipe)
    averaged = " of averaged weights" if recipe.ema_decay is not None else ""
    shown = targets[-TARGETS:] if metric.higher_is_better else targets[TARGETS - 1 :: -1]
    return columns(
        "Result",
        ["", *(result.name for result in results)],
        [
            *(
                [
                    # A target such as 75.97 % is not rounded.
                    f"steps to {metric.word} "
                    + (f"{100 * target:.6g}%" if metric.share else f"{target:.6g}"),
                    *(_when(result.reaching(target)) for result in results),
                ]
                for target in shown
            ),
            [
                f"final {metric.word}{averaged}",
                *(metric.text(result.value(result.final)) for result in results),
            ],
            ["steps in total", *(_when(result.final) for result in results)],
            [
                "median step / refresh step",
                *(
                    " / ".join(
                        milliseconds(median(kind))
                        for kind in (result.ordinary, result.refresh)
                        if kind
                    )
                    for result in results
                ),
            ],
        ],
        left=1,
    )


def _when(line: dict[str, Any] | None) -> str:
    return "not reached" if line is None else f"{line['step']} ({line['seconds']:.1f} s)"


def compared(results: Sequence[Result]) -> str:
    """Say the step and time when each optimizer reached what AdamW, or the last one, ends with."""
    reference = next((result for result in results if result.name == "adamw"), results[-1])
    goal, metric = reference.value(reference.final), reference.metric
    if len(results) < 2 or math.isnan(goal):
        return ""
    took = ", ".join(f"{result.name} {_when(result.reaching(goal))}" for result in results)
    return f"Steps to what {reference.name} ends with ({metric.word} {metric.text(goal)}): {took}"
