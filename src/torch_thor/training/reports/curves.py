"""The picture of a run's curves: training loss and primary metric against steps and against seconds."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_thor.training.reports.pictures import save_picture
from torch_thor.training.reports.summary import Summary
from torch_thor.training.tasks.task import primary

SMOOTHING = 0.9  # decay of the running average of the training loss


def draw_curves(summaries: Sequence[Summary], path: Path) -> None:
    """Draw the loss and the primary metric against steps and against seconds.

    Args:
        summaries: The runs, all of the same task.
        path: The file to write; its suffix determines the format.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot, which may open windows

    decides = primary(summaries[0].metrics)
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row")
    for summary in summaries:
        steps, evaluations = summary.record.steps, summary.record.evaluations
        losses = _smooth([point.loss for point in steps])
        values = [point.metrics[decides.name] for point in evaluations]
        axes[0][0].plot([point.step for point in steps], losses, label=summary.name)
        axes[0][1].plot([point.seconds for point in steps], losses, label=summary.name)
        axes[1][0].plot([point.step for point in evaluations], values, marker=".", label=summary.name)
        axes[1][1].plot([point.seconds for point in evaluations], values, marker=".", label=summary.name)
        if any(point.averaged is not None for point in evaluations):
            averages = [math.nan if p.averaged is None else p.averaged[decides.name] for p in evaluations]
            style: dict[str, Any] = {"ls": "--", "marker": ".", "label": f"{summary.name}, averaged weights"}
            axes[1][0].plot([point.step for point in evaluations], averages, **style)
            axes[1][1].plot([point.seconds for point in evaluations], averages, **style)
    for column, unit in enumerate(("steps", "seconds of training")):
        axes[0][column].set(yscale="log", ylabel="training loss, smoothed")
        axes[1][column].set(xlabel=unit, ylabel=f"test {decides.title}")
        for row in (0, 1):
            axes[row][column].grid(alpha=0.3)
            axes[row][column].legend()
    save_picture(figure, path)


def _smooth(values: Sequence[float]) -> list[float]:
    smooth: list[float] = []
    latest = math.nan
    for value in values:
        if math.isfinite(value):  # the loss of a skipped step may not be
            latest = value if math.isnan(latest) else SMOOTHING * latest + (1 - SMOOTHING) * value
        smooth.append(latest)
    return smooth
