"""What a run writes and prints while it trains, by observers in the first process."""

import json
import math
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich import progress
from rich.console import Console

from torch_thor.errors import require
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.printing import printer
from torch_thor.training.folder import RunFolder
from torch_thor.training.loop import Observer, Point, Run, Score
from torch_thor.training.tasks.task import primary


def observers_of(run: Run, folder: RunFolder, console: Console, offset: int) -> list[Any]:
    """Print what is trained, and return the observers; `Metrics` is the first of them."""
    for line in facts(run):
        printer(console)(line)
    return [
        Metrics(folder.metrics(run.name), offset),
        Progress(run, folder.path / run.name / "tensorboard", console),
    ]


def facts(run: Run) -> Iterator[str]:
    """Describe the training, before its first optimizer."""
    recipe, device = run.recipe, run.ranks.device
    if run.name == recipe.optimizer[0]:
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        yield (
            f"{recipe.name}: {recipe.model} ({parameters:,} parameters), {run.total_steps:,} steps "
            f"with each of {', '.join(recipe.optimizer)}, on {where}, processes={run.ranks.world}, "
            f"threads={torch.get_num_threads()}"
        )
    if recipe.optimizers.get(run.name, {}).get("split_dim") == "auto":
        yield (
            f"{run.name}: split_dim={run.optimizer.param_groups[0]['split_dim']} was measured for "
            "this network and device"
        )


class Metrics(Observer):
    """Writes `metrics.jsonl`: a line for each step, each refresh of a layer and each evaluation.

    Args:
        path: The file.
        offset: Its length in bytes at the checkpoint from which the run continues; what follows
            is removed.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        require(
            self._file.tell() >= offset,
            f"{path} is shorter than when the checkpoint was saved ({offset} bytes): put the whole "
            "file back, or start another run with weights=CHECKPOINT and --out",
        )
        self._file.seek(offset)
        self._file.truncate()

    def step(self, run: Run, point: Point) -> None:
        """Write a step, and the decision on each layer that it refreshed."""
        self._write(
            "step", {name: value for name, value in vars(point).items() if name != "events"}
        )
        for event in point.events:
            self._write(
                "refresh",
                {
                    "step": point.step,
                    "layer": event.layer,
                    "decision": event.decision.value,
                    "trace_change": event.trace_change,
                    "trace": event.trace,
                },
            )

    def evaluation(self, run: Run, score: Score) -> None:
        """Write an evaluation."""
        metric, averaged = primary(run.task.metrics), score.averaged or {}
        self._write(
            "eval",
            {
                "step": score.step,
                "seconds": score.seconds,
                **score.metrics,
                **{f"averaged_{name}": averaged.get(name) for name in score.metrics},
                "primary": metric.name,
                "higher_is_better": metric.higher_is_better,
            },
        )

    def offset(self) -> int:
        """Flush the file to the disk and return its length in bytes, for a checkpoint to store."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, **finite(values)}).encode() + b"\n")


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with None for what is not finite, because JSON has no infinity and no NaN."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


class Progress(Observer):
    """Prints lines and, in a terminal, a bar; writes TensorBoard's scalars.

    Args:
        run: The run. If it continues, its scalars replace those after its checkpoint.
        folder: The folder of TensorBoard's events.
        console: Where it prints.
    """

    def __init__(self, run: Run, folder: Path, console: Console) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1)
        self._points = deque[Point](maxlen=run.recipe.log_interval or 1)
        self._say, self._fifth = printer(console), 0
        self._bar = progress.Progress(
            progress.TextColumn("{task.description:>9}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_interactive,
        )
        self._task = self._bar.add_task(run.name, total=run.total_steps, completed=run.step)
        self._bar.start()

    def step(self, run: Run, point: Point) -> None:
        """Show the loss and what a refresh decided, and all figures every `log_interval` steps."""
        self._bar.update(self._task, completed=point.step)
        self._points.append(point)
        interval = run.recipe.log_interval
        found = figures(run, self._points) if interval and point.step % interval == 0 else {}
        if found:
            said = (f"{name.replace('_', ' ')} {value:.4g}" for name, value in found.items())
            self._say(f"{place(run)}, {', '.join(said)}")
        self._add("train", point.step, {**found, "loss": point.loss})
        self._add("thor", point.step, Counter(event.decision.value for event in point.events))
        self._add(
            "trace_change",
            point.step,
            {event.layer: event.trace_change for event in point.events},
        )

    def evaluation(self, run: Run, score: Score) -> None:
        """Show an evaluation; without a terminal, only the first of each fifth, and the last."""
        said = [
            f"{metric.word} {metric.text(score.value(metric.name))}"
            for metric in run.task.metrics
            if metric.primary or metric.name == "loss"
        ]
        whose = "" if score.averaged is None else "averaged weights: "
        fifth = 5 * run.step // run.total_steps
        if self._fifth < fifth or self._bar.console.is_interactive or run.done:
            self._say(f"{place(run)}, {score.seconds:.1f} s, {whose}{', '.join(said)}")
        self._fifth = fifth
        self._add("test", score.step, score.metrics)
        self._add("averaged", score.step, score.averaged or {})

    def close(self) -> None:
        """Leave the bar as it is, and close the events."""
        self._bar.stop()
        self._writer.close()

    def _add(self, group: str, step: int, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step)


def figures(run: Run, points: Sequence[Point]) -> dict[str, float]:
    """Summarise consecutive steps: means, median durations in ms, and the last settings."""
    seconds = sum(point.duration for point in points)
    ordinary = [1000 * point.duration for point in points if not point.refresh]
    refresh = [1000 * point.duration for point in points if point.refresh]
    found = {
        "loss": fmean(point.loss for point in points),
        "lr": points[-1].lr,
        "damping": points[-1].damping,
        f"{run.task.unit}_per_second": sum(point.terms for point in points) / seconds,
        "step_ms": median(ordinary) if ordinary else None,
        "refresh_step_ms": median(refresh) if refresh else None,
        "waiting_for_data": sum(point.waited for point in points) / seconds,
        "skipped_steps": sum(point.skipped for point in points) or None,
    }
    if isinstance(run.optimizer, CurvatureOptimizer):
        found["stopped_layers"] = sum(layer.stopped for layer in run.optimizer.curvature.values())
    return {name: value for name, value in found.items() if value is not None}


def place(run: Run) -> str:
    """Say how far a training is, after one step or more."""
    return (
        f"{run.name}: step {run.step} of {run.total_steps}, "
        f"epoch {run.step / run.task.steps_per_epoch:.4g}"
    )
