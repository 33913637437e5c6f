"""The picture of a run's curves: training loss and primary metric against steps and seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_thor.files import whole_file

if TYPE_CHECKING:
    from torch_thor.training.summary import Result


def draw_curves(results: Sequence["Result"], path: Path) -> None:
    """Draw the curves of all optimizers into a file, which is written whole or not at all."""
    from matplotlib.figure import Figure  # slow to import; without pyplot, which may open windows

    metric = results[0].metric
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for column, (key, unit) in enumerate(
        {"step": "steps", "seconds": "seconds of training"}.items()
    ):
        losses, metrics = axes[:, column]
        losses.set(yscale="log", ylabel="training loss, smoothed")
        metrics.set(xlabel=unit, ylabel=f"test {metric.title}")
        for one in results:
            losses.plot(
                [point[column] for point in one.curve],
                [point[2] for point in one.curve],
                label=one.name,
            )
            for prefix, label, style in (("", "", "-"), ("averaged_", ", averaged weights", "--")):
                drawn = [
                    (line[key], line.get(f"{prefix}{metric.name}")) for line in one.evaluations
                ]
                if known := [pair for pair in drawn if pair[1] is not None]:
                    metrics.plot(
                        *zip(*known, strict=True), style, marker=".", label=f"{one.name}{label}"
                    )
        for part in (losses, metrics):
            part.grid(alpha=0.3)
            part.legend()
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=120)
