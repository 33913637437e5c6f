"""Drawing functions that the pictures of all comparisons share."""

import statistics
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_thor.files import whole_file

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FEW = 20  # points of a curve; fewer are marked, because a line does not show where they are


def draw_band(
    axes: "Axes",
    xs: Sequence[float],
    series: Sequence[Sequence[float]],
    *,
    label: str,
    colour: Any = None,
) -> None:
    """Draw the mean of some series as a line, and behind it the lowest to the highest value."""
    columns = list(zip(*series, strict=True))
    (line,) = axes.plot(
        xs,
        [statistics.fmean(column) for column in columns],
        label=label,
        color=colour,
        marker=marker(xs),
    )
    if len(series) > 1:
        axes.fill_between(
            xs,
            [min(c) for c in columns],
            [max(c) for c in columns],
            color=line.get_color(),
            alpha=0.2,
        )


def save(figure: "Figure", path: Path) -> None:
    """Write a picture as the documentation has them; only a complete one replaces a file."""
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110)


def marker(points: Sized) -> str:
    """Return the marker of a curve, which is none if its points are many."""
    return "." if len(points) < FEW else ""


def legend_below(figure: "Figure", axes: Iterable["Axes"]) -> None:
    """Name each curve once, below the axes, where nothing is covered."""
    named: dict[str, Any] = {}
    for subplot in axes:
        for line, label in zip(*subplot.get_legend_handles_labels(), strict=True):
            named.setdefault(label, line)
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False)
