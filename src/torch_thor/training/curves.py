"""The picture of a run's curves: training loss and primary metric against steps and seconds."""

from collections.abc import Iterable, Sequence, Sized
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_thor.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torch_thor.training.summary import Result

FEW = 20  # points of a curve; fewer are marked, because a line alone does not show where they are


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
        metrics.set(xlabel=unit, ylabel=f"held-out {metric.title}")
        for result in results:
            (line,) = losses.plot(
                [point[column] for point in result.curve],
                [point[2] for point in result.curve],
                marker=marker(result.curve),
                label=result.name,
            )
            for prefix, label, style in (("", "", "-"), ("averaged_", ", averaged weights", "--")):
                drawn = [(at[key], at.get(f"{prefix}{metric.name}")) for at in result.evaluations]
                if known := [pair for pair in drawn if pair[1] is not None]:
                    metrics.plot(
                        *zip(*known, strict=True),
                        style,
                        color=line.get_color(),
                        marker=marker(known),
                        label=f"{result.name}{label}",
                    )
        for part in (losses, metrics):
            part.grid(alpha=0.3)
            label_in_full(part)
    legend_below(figure, axes[:, 0])
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=120)


def marker(points: Sized) -> str:
    """Return the marker of a curve, which is none if its points are many."""
    return "." if len(points) < FEW else ""


def label_in_full(axes: "Axes") -> None:
    """Label ticks with numbers in full, without powers of ten and offsets."""
    from matplotlib.ticker import LogFormatter

    class InFull(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            is_shown = super().__call__(x, pos)
            return f"{Decimal(f'{x:.6g}'):f}" if is_shown else ""

    for name in ("x", "y"):
        axis = getattr(axes, f"{name}axis")
        if axis.get_scale() == "log":
            axis.set_major_formatter(InFull())
            axis.set_minor_formatter(InFull())
        else:
            axes.ticklabel_format(axis=name, style="plain", useOffset=False)


def legend_below(figure: "Figure", axes: Iterable["Axes"]) -> None:
    """Name each curve once, below the axes, where nothing is covered."""
    named: dict[str, Any] = {}
    for subplot in axes:
        for line, label in zip(*subplot.get_legend_handles_labels(), strict=True):
            named.setdefault(label, line)
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False)
