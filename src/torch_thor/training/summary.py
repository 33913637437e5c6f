"""The report of a run: what each optimizer has reached, in a table, a sentence, `summary.json` and `curves.png`."""

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from torch_thor.files import write_text, writing
from torch_thor.training.curves import draw_curves
from torch_thor.training.errors import UserError
from torch_thor.training.folder import RunFolder
from torch_thor.training.printing import milliseconds, printer
from torch_thor.training.recipe import Recipe
from torch_thor.training.tasks.task import Metric, Task, primary

TARGETS = 3  # rows of the table; with the three others it has six
CURVE = 2000  # points of a drawn curve, at least, if there were as many steps
SMOOTHING = 0.9  # decay of the running average of the training loss


def report(folder: RunFolder, recipe: Recipe, task: Task, console: Console) -> None:
    """Print the results of a run, and write them to its folder.

    Args:
        folder: The run folder.
        recipe: The recipe.
        task: Its task.
        console: Where the table and the comparison are printed.

    Raises:
        UserError: If a metrics file cannot be read, or a file not written.
    """
    results = [Result(name, folder.metrics(name), primary(task.metrics)) for name in recipe.optimizer]
    with writing(folder.curves):
        draw_curves(results, folder.curves)
    with writing(folder.summary):
        write_text(folder.summary, json.dumps([as_json(one, recipe, task.unit) for one in results], indent=2) + "\n")
    console.print(table(results, recipe))
    for line in compared(results):
        printer(console)(line)
    printer(console)(f"Curves, metrics, recipe and checkpoints are in {folder.path}")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a `metrics.jsonl`, without an incomplete last one that a killed run has left.

    Raises:
        UserError: If the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({why}): start again with --overwrite or --out") from error


class Result:
    """What one optimizer has reached.

    Args:
        name: Its name.
        path: Its `metrics.jsonl`, of which two numbers are held for each step, whatever its length.
        metric: The primary metric.
    """

    def __init__(self, name: str, path: Path, metric: Metric) -> None:
        self.name, self.metric = name, metric
        self.evaluations: list[dict[str, Any]] = []
        self.curve: list[tuple[int, float, float]] = []  # step, seconds, smoothed loss
        self.decisions: Counter[tuple[str, str]] = Counter()  # of the trace rule, by layer
        self.ordinary, self.refresh, self.rates = array("d"), array("d"), array("d")
        self.waited = self.seconds = 0.0
        self.skipped = 0
        loss, stride = math.nan, 1
        for line in read(path):
            if line["kind"] == "eval":
                self.evaluations.append(line)
            elif line["kind"] == "refresh":
                self.decisions[line["layer"], line["decision"]] += 1
            else:
                (self.refresh if line["refresh"] else self.ordinary).append(line["duration"])
                if not line["refresh"] and line["duration"]:
                    self.rates.append(line["terms"] / line["duration"])
                self.waited, self.seconds = self.waited + line["waited"], self.seconds + line["duration"]
                self.skipped += line["skipped"]
                if line["loss"] is not None:  # that of a skipped step may not be finite
                    loss = line["loss"] if math.isnan(loss) else SMOOTHING * loss + (1 - SMOOTHING) * line["loss"]
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
        found = line.get(f"averaged_{self.metric.name}")
        found = line[self.metric.name] if found is None else found
        return math.nan if found is None else float(found)

    def best(self) -> dict[str, Any]:
        """The first evaluation with the best value."""
        best = self.evaluations[0]
        for line in self.evaluations:
            best = line if self.metric.better(self.value(line), self.value(best)) else best
        return best

    def reaching(self, target: float) -> dict[str, Any] | None:
        """The first evaluation whose value is a target or better."""
        return next((line for line in self.evaluations if not self.metric.better(target, self.value(line))), None)


def targets_of(recipe: Recipe) -> list[float]:
    """The values of the primary metric whose steps are reported, in order."""
    return sorted({*recipe.targets, *([] if recipe.stop_at is None else [recipe.stop_at])})


def as_json(result: Result, recipe: Recipe, unit: str) -> dict[str, Any]:
    """Return the results of an optimizer as JSON values."""
    final, best, decided = result.final, result.best(), result.decisions
    reached = {str(target): result.reaching(target) for target in targets_of(recipe)}
    return {
        "optimizer": result.name,
        "steps": final["step"],
        **{key: value for key, value in final.items() if key not in ("kind", "step", "primary", "higher_is_better")},
        "best": {"step": best["step"], result.metric.name: result.value(best)},
        "stop_at": recipe.stop_at,
        "ended_at_target": recipe.stop_at is not None and reached[str(recipe.stop_at)] is final,
        "targets": {key: line and {"steps": line["step"], "seconds": line["seconds"]} for key, line in reached.items()},
        f"{unit}_per_second": median(result.rates) if result.rates else None,
        "waiting_for_data": result.waited / result.seconds if result.seconds else 0.0,
        "skipped_steps": result.skipped,
        "ordinary_step_seconds": median(result.ordinary) if result.ordinary else None,
        "refresh_step_seconds": median(result.refresh) if result.refresh else None,
        "refreshed": {
            layer: {"refreshes": decided[layer, "update"], "kept": decided[layer, "keep"],
                    "failed": decided[layer, "failed"], "stopped": bool(decided[layer, "stop"])}
            for layer, _ in decided
        },
    }  # fmt: skip


def table(results: Sequence[Result], recipe: Recipe) -> Table:
    """Make the final table of at most six rows, with a column for each optimizer; `summary.json` has more."""
    metric, targets = results[0].metric, targets_of(recipe)
    found = Table(title="Result", title_justify="left")
    found.add_column("")
    for one in results:
        found.add_column(one.name, justify="right")
    for target in targets[-TARGETS:] if metric.higher_is_better else targets[TARGETS - 1 :: -1]:
        lines = [one.reaching(target) for one in results]
        cells = ["not reached" if line is None else f"{line['step']} ({line['seconds']:.1f} s)" for line in lines]
        found.add_row(f"steps to {metric.word} {_exact(metric, target)}", *cells)
    averaged = " of averaged weights" if recipe.ema_decay is not None else ""
    found.add_row(f"final {metric.word}{averaged}", *(metric.text(one.value(one.final)) for one in results))
    found.add_row("steps in total", *(f"{o.final['step']} ({o.final['seconds']:.1f} s)" for o in results))
    found.add_row("median step (refresh step)", *map(_step, results))
    return found


def _exact(metric: Metric, value: float) -> str:
    """A target such as 75.97 %, which is not rounded."""
    return f"{100 * value:.6g}%" if metric.share else f"{value:.6g}"


def _step(result: Result) -> str:
    ordinary, refresh = (milliseconds(median(one)) if one else "none" for one in (result.ordinary, result.refresh))
    return f"{ordinary} ({refresh})" if result.refresh else ordinary


def compared(results: Sequence[Result]) -> Iterator[str]:
    """Say after which step and time each optimizer has reached what AdamW, or the last optimizer, ends with."""
    reference = next((one for one in results if one.name == "adamw"), results[-1])
    goal = reference.value(reference.final)
    if len(results) < 2 or math.isnan(goal):
        return
    said = []
    for one in results:
        line = one.reaching(goal)
        took = "did not reach it" if line is None else f"{line['step']} steps ({line['seconds']:.1f} s)"
        said.append(f"{one.name} {took}")
    metric = reference.metric
    yield f"To reach what {reference.name} ends with ({metric.word} {metric.text(goal)}): {', '.join(said)}"
