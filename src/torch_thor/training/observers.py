"""The observers of the first process: metrics, scalars for TensorBoard, progress and a profile.

What is said first is here too.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torch_thor.errors import require
from torch_thor.files import writing
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.report import sizes
from torch_thor.printing import printer
from torch_thor.training.folder import RunFolder
from torch_thor.training.loop import Observer, Point, Run, Score
from torch_thor.training.profiling import Profiler
from torch_thor.training.progress import Bar, Lines, summarised
from torch_thor.training.tasks.task import primary

# TensorBoard draws 1000 random points of a curve, and a point for each of very many steps would
# need hundreds of megabytes. A point therefore summarises `log_interval` steps, or fewer where a
# curve would have less than this many.
FULL_CURVE = 100
_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps would make an encoder for each line


def observers_of(
    run: Run, folder: RunFolder, console: Console, profile: bool, offset: int
) -> list[Any]:
    """Say what runs, and make the observers, that of the metrics first, one that profiles last."""
    for line in facts(run):
        printer(console)(line)
    optimizer_folder = folder.path / run.name
    observers = [
        Metrics(folder.metrics(run.name), offset),
        TensorBoard(optimizer_folder / "tensorboard", run),
        Bar(run, console) if console.is_interactive else Lines(run, console),
    ]
    return [*observers, Profiler(optimizer_folder / "profile", console)] if profile else observers


def facts(run: Run) -> list[str]:
    """Say what runs where, once for all optimizers, and which network part the curvature is for."""
    recipe, optimizer, device, lines = run.recipe, run.optimizer, run.ranks.device, []
    if run.name == recipe.optimizer[0]:
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        several = f"{run.ranks.world} processes on " if run.ranks.world > 1 else ""
        lines.append(
            f"{recipe.name}: {recipe.model} ({parameters:,} parameters), {run.total_steps:,} steps "
            f"with each of {', '.join(recipe.optimizer)}, on {several}{where}, "
            f"threads={torch.get_num_threads()}"
        )
    if isinstance(optimizer, CurvatureOptimizer):
        entries = optimizer.coverage()
        covered, total = sizes(entries)
        plain = [entry for entry in entries if entry.trained and not entry.preconditioned]
        modules = {(entry.kind, entry.name.rpartition(".")[0]) for entry in plain}
        # ThorMuon does not precondition the bias of a preconditioned layer.
        kinds = Counter(
            f"biases of {kind}" if name in optimizer.curvature else kind for kind, name in modules
        )
        others = ", ".join(f"{kind} ({number})" for kind, number in sorted(kinds.items()))
        rest = " and ".join(sorted({entry.rest for entry in plain}))
        lines.append(
            f"{run.name}: preconditions {len(optimizer.curvature)} layers with "
            f"{covered / max(1, total):.2%} of the parameters"
            + (f"; {rest} for the rest: {others}" if others else "")
        )
    if recipe.optimizers.get(run.name, {}).get("split_dim") == "auto":
        measured = optimizer.param_groups[0]["split_dim"]
        lines.append(f"{run.name}: split_dim={measured} was measured for this network and device")
    return lines


class Metrics(Observer):
    """A writer of `metrics.jsonl`: a line for each step, refresh of a layer and evaluation.

    It writes after the first `offset` bytes.

    Raises:
        UserError: If the file cannot be written (as in every method), or is not that of the
            checkpoint.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            size = self._file.tell()
            require(
                size >= offset,
                f"{path} has {size} bytes, but it had {offset} when the checkpoint was saved: put "
                "the whole file back, or start another run with weights=CHECKPOINT and --out",
            )
            self._file.seek(max(0, offset - 1))
            require(
                offset == 0 or self._file.read(1) == b"\n",
                f"{path} was changed since the checkpoint was saved: no line ends at byte "
                f"{offset}, where it ended (were its line ends converted?): put the file back, or "
                "start another run with weights=CHECKPOINT and --out",
            )
            self._file.truncate(offset)

    def step(self, run: Run, point: Point) -> None:
        """Write the line of a step, and one for each layer that was due."""
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
        """Write the line of an evaluation."""
        averages = {f"averaged_{name}": (score.averaged or {}).get(name) for name in score.metrics}
        metric = primary(run.task.metrics)
        self._write(
            "eval",
            {
                "step": score.step,
                "seconds": score.seconds,
                **score.metrics,
                **averages,
                "primary": metric.name,
                "higher_is_better": metric.higher_is_better,
            },
        )

    def offset(self) -> int:
        """Flush the file to the disk and return its length in bytes, for a checkpoint to store."""
        with writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        with writing(self.path):
            self._file.close()

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        # JSON has no infinity and no NaN
        plain = {
            key: None if isinstance(v, float) and not math.isfinite(v) else v
            for key, v in values.items()
        }
        with writing(self.path):
            self._file.write(_encode({"kind": kind, **plain}).encode() + b"\n")


class TensorBoard(Observer):
    """A writer of TensorBoard scalars; a resumed run's replace those newer than its checkpoint."""

    def __init__(self, folder: Path, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        self._every = max(
            1, min(run.recipe.log_interval or run.total_steps, run.total_steps // FULL_CURVE)
        )
        self._points: list[Point] = []
        self.folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=run.step + 1)

    def step(self, run: Run, point: Point) -> None:
        """Keep a step for the next point of the curves."""
        self._points.append(point)

    def evaluation(self, run: Run, score: Score) -> None:
        """Write the metrics of an evaluation."""
        self._add("test", score.step, score.metrics)
        self._add("averaged", score.step, score.averaged or {})

    def end_of_step(self, run: Run) -> None:
        """Write a point that summarises the steps since the latest one, if it is time."""
        if self._points and (run.done or run.step % self._every == 0):
            events = [event for point in self._points for event in point.events]
            self._add("train", run.step, summarised(run, self._points))
            self._add("thor", run.step, Counter(event.decision.value for event in events))
            self._add(
                "trace_change", run.step, {event.layer: event.trace_change for event in events}
            )
            self._points.clear()

    def close(self) -> None:
        """Flush and close the writer."""
        with writing(self.folder):
            self._writer.close()

    def _add(self, group: str, step: int, values: Mapping[str, float | None]) -> None:
        with writing(self.folder):
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(f"{group}/{name}", value, step)
