"""The trainings of figures: jobs from options, what is measured of one, and cells of tables."""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.runner.markdown import reached, summary
from benchmarks.runner.numbers import running_mean
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon
from torch_thor.errors import DivergedError
from torch_thor.training.loop import Observer, Point, Record, Run, train
from torch_thor.training.optimizers import OPTIMIZERS, settings_of
from torch_thor.training.parallel import Ranks, device_of
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.recipes import load_recipe, override
from torch_thor.training.run import build
from torch_thor.training.tasks.opening import open_task
from torch_thor.training.tasks.task import primary

Row = dict[str, Any]
# those that were given: data, epochs, eval_interval, seeds, batch_sizes, model, pixels
Options = Mapping[str, Any]
OURS = (THOR, ThorMuon, LAMB, AGCSGD)
Setting = tuple[Row, str, Sequence[str]]  # its names in the figure, its optimizer, key=value words
FASHION = "fashion-mnist"
# keys of a recipe that change nothing that is measured
UNUSED = {
    "name",
    "about",
    "reaches",
    "device",
    "checkpoint_interval",
    "keep_checkpoints",
    "keep_best",
    "log_interval",
}
# steps before each in the mean of the loss; points of its curve that are kept
SMOOTHED, POINTS = 25, 40


def words_of(options: Options, default: str, quick: Sequence[str]) -> tuple[str, list[str]]:
    """Return the recipe of a figure and the words on top.

    For the default recipe these include those that make it quick.
    """
    name = options.get("data", default)
    own = [f"{key}={options[key]}" for key in ("epochs", "eval_interval") if key in options]
    return name, ["threads=1", *(quick if name == default else ()), *own]


def jobs_of(
    recipe: tuple[str, list[str]], options: Options, device: str, settings: Iterable[Setting]
) -> list[Row]:
    """Return the jobs of trainings as JSON values, seed by seed.

    A job has all that changes a result, and each setting by name.
    """
    found = []
    for seed, (own, optimizer, words) in itertools.product(options.get("seeds", (0,)), settings):
        chosen = load_recipe(
            recipe[0], [f"optimizer={optimizer}", f"seed={seed}", *recipe[1], *words]
        )
        tree = chosen.model_dump(mode="json", exclude=UNUSED)
        every: Row = {**settings_of(optimizer), **chosen.optimizers.get(optimizer, {})}
        if not every.get("anytime"):  # a job is known by what it had when it ran
            every.pop("anytime", None)
        tree["optimizers"] = {optimizer: every}
        found.append({**own, "seed": seed, "recipe": tree, "device": str(device_of(device))})
    return list(json.loads(json.dumps(found)))


def optimizers(job: Row) -> list[str]:
    """Return the names of our optimizers that a job trains."""
    kinds = [OPTIMIZERS[name] for name in job["recipe"]["optimizers"]]
    return [kind.__name__ for kind in kinds if kind in OURS]


class Clock(Observer):
    """The seconds of the steps so far.

    On a CPU they are those of the processor, which other processes hardly affect, or else real
    ones.
    """

    def __init__(self, *, processor: bool) -> None:
        self.seconds: list[float] = []
        self._processor, self._begun = processor, time.process_time()

    def step(self, run: Run, point: Point) -> None:
        """Keep the time at the end of a step."""
        self.seconds.append(time.process_time() - self._begun if self._processor else point.seconds)

    def end_of_step(self, run: Run) -> None:
        """Leave out the time since the step: evaluations and observers."""
        self._begun = time.process_time() - self.seconds[-1]


def measured(job: Row, *observers: Observer) -> Row:
    """Train once. A training that diverges is a result, with its message as `failure`."""
    recipe = override(Recipe(**job["recipe"]), [f"device={job['device']}"])
    torch.set_num_threads(recipe.threads or 1)
    device, record, failure = torch.device(job["device"]), Record(), None
    task = open_task(recipe, device, print)
    run = build(recipe, recipe.optimizer[0], task, Ranks(device=device))
    clock = Clock(processor=device.type == "cpu")
    try:
        train(run, [record, clock, *observers])
    except DivergedError as error:
        failure = str(error)
    metric, seconds, points = primary(task.metrics), clock.seconds, record.points
    evaluations = [
        {
            "step": one.step,
            "seconds": short(seconds[one.step - 1]),
            "value": one.value(metric.name),
            **one.metrics,
        }
        for one in record.scores
    ]
    decisions = [event.decision.value for point in points for event in point.events]
    means, every = (
        running_mean([point.loss for point in points], SMOOTHED),
        max(1, len(points) // POINTS),
    )
    return {
        "value": evaluations[-1]["value"] if evaluations and failure is None else None,
        "failure": failure,
        "metric": metric.title,
        "higher": metric.higher_is_better,
        "steps": len(points),
        "steps_per_epoch": task.steps_per_epoch,
        "seconds": short(sum(seconds[-1:])),
        "evaluations": evaluations,
        "losses": [
            [i + 1, short(seconds[i]), short(means[i])]
            for i in range(every - 1, len(points), every)
        ],
        **step_times(seconds, [point.refresh for point in points]),
        "refreshed": decisions.count("update"),
        "due": len(decisions),
    }


def step_times(seconds: Sequence[float], refresh: Sequence[bool]) -> Row:
    """Return the number of refresh steps, and two median step times in milliseconds.

    The medians are those of ordinary and of refresh steps.
    """
    took = [after - before for before, after in itertools.pairwise([0.0, *seconds])]
    kinds = [
        [own for own, was in zip(took, refresh, strict=True) if was == kind]
        for kind in (False, True)
    ]
    medians = [short(1000 * statistics.median(times)) if times else None for times in kinds]
    return {"refresh_steps": sum(refresh), "step_ms": medians[0], "refresh_step_ms": medians[1]}


def short(value: float) -> float:
    """Round to the digits that are stored."""
    return float(f"{value:.6g}")


def reach(row: Row, target: float | None) -> Row | None:
    """Return the first evaluation that is as good as a target."""
    sign = 1 if row["higher"] else -1
    good = (
        one
        for one in row["evaluations"]
        if target is not None and sign * (one["value"] - target) >= 0
    )
    return next(good, None)


def to_target(rows: Sequence[Row], targets: Sequence[float | None], form: str, key: str) -> str:
    """Format the `epochs`, or an entry of the evaluation, at which each run reaches its target."""
    hits = [
        (row["steps_per_epoch"], reach(row, target))
        for row, target in zip(rows, targets, strict=True)
    ]
    own = [
        None if hit is None else {**hit, "epochs": hit["step"] / span}[key] for span, hit in hits
    ]
    return reached(own, form)


def finals(rows: Sequence[Row]) -> str:
    """Format the last value of each seed, or how a training ended."""
    failed = [row for row in rows if row["failure"]]
    return (
        f"diverged after {failed[0]['steps']} steps"
        if failed
        else summary([row["value"] for row in rows], ".4f")
    )


def clock_of(rows: Sequence[Row]) -> str:
    """Say what the times are."""
    return "processor seconds" if rows[0]["job"]["device"] == "cpu" else "seconds"


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return the rows by the value of a function of their jobs, in order of first occurrence."""
    values = dict.fromkeys(key(row["job"]) for row in rows)
    return {value: [row for row in rows if key(row["job"]) == value] for value in values}
