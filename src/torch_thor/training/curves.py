"""The picture of a run's curves: training loss and primary metric against steps and against seconds."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_thor.files import whole_file

if TYPE_CHECKING:
    from torch_thor.training.summary import Result


def draw_curves(results: Sequence["Result"], path: Path) -> None:
    """Draw the curves of all optimizers.

    Args:
        results: Their results, of the same task.
        path: The file to write, whole or not at all; its suffix determines the format.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot, which may open windows

    metric = results[0].metric
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for result in results:
        steps, seconds, losses = zip(*result.curve, strict=True)
        for column, places in enumerate((steps, seconds)):
            axes[0][column].plot(places, losses, label=result.name)
        for prefix, label, style in (("", "", "-"), ("averaged_", ", averaged weights", "--")):
            values = [line.get(f"{prefix}{metric.name}") for line in result.evaluations]
            if any(value is not None for value in values):
                drawn = [math.nan if value is None else value for value in values]
                for column, key in enumerate(("step", "seconds")):
                    at = [line[key] for line in result.evaluations]
                    axes[1][column].plot(at, drawn, style, marker=".", label=f"{result.name}{label}")
    for column, unit in enumerate(("steps", "seconds of training")):
        axes[0][column].set(yscale="log", ylabel="training loss, smoothed")
        axes[1][column].set(xlabel=unit, ylabel=f"test {metric.title}")
        for row in (0, 1):
            axes[row][column].grid(alpha=0.3)
            axes[row][column].legend()
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=120)
