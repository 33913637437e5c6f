"""Drawing functions that the pictures of all comparisons share."""

import statistics
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_thor.files import whole_file

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FEW = 20  # points of a curve; fewer are marked, because a line alone does not show where they are


def draw_band(
    axes: "Axes",
    xs: Sequence[float],
    series: Sequence[Sequence[float]],
    *,
    label: str,
    colour: Any = None,
    style: str = "-",
) -> None:
    """Draw the mean of some series as a line, and their range behind it.

    The range is that from the lowest to the highest value.
    """
    columns = list(zip(*series, strict=True))
    (line,) = axes.plot(
        xs,
        [statistics.fmean(column) for column in columns],
        label=label,
        color=colour,
        marker=marker(xs),
        ls=style,
    )
    if len(series) > 1:
        axes.fill_between(
            xs,
            [min(c) for c in columns],
            [max(c) for c in columns],
            color=line.get_color(),
            alpha=0.2,
        )


@dataclass(frozen=True)
class Contestant:
    """What is drawn of an optimizer: its values by seed, at the same steps and seconds for all."""

    label: str
    colour: str
    steps: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[Sequence[float]]

    @classmethod
    def of_curves(
        cls,
        label: str,
        colour: str,
        curves: Sequence[Sequence[Sequence[float]]],
        seconds: Sequence[float],
    ) -> "Contestant":
        """Return what is drawn of curves, each of points that begin with (steps, value)."""
        values = [[point[1] for point in curve] for curve in curves]
        return cls(label, colour, [point[0] for point in curves[0]], seconds, values)


def save_contests(
    contests: Mapping[str, Sequence[Contestant]], path: Path, *, device: str = "one core"
) -> None:
    """Save a picture with a row for each contest in which there is somebody, if there is one.

    A row has the name of its values, which it shows against steps and against seconds.
    """
    from matplotlib.figure import Figure

    contests = {name: contestants for name, contestants in contests.items() if contestants}
    if not contests:
        return
    figure = Figure(figsize=(9, 3.6 * len(contests)), layout="constrained")
    grid = figure.subplots(len(contests), 2, squeeze=False, sharey="row")
    for (name, contestants), (left, right) in zip(contests.items(), grid, strict=True):
        for one in contestants:
            draw_band(left, one.steps, one.values, label=one.label, colour=one.colour)
            draw_band(right, one.seconds, one.values, label=one.label, colour=one.colour)
        left.set(xlabel="steps", ylabel=name)
        right.set(xlabel=f"seconds, {device}")
        left.grid(alpha=0.3)
        right.grid(alpha=0.3)
    legend_below(figure, grid[0][:1])
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Write a picture in the resolution of the documentation.

    A file is replaced only by a complete one.
    """
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110)


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
