"""Drawing functions that the pictures of all comparisons share."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_thor.files import whole_file
from torch_thor.training.curves import marker

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def save(figure: "Figure", path: Path) -> None:
    """Write a picture in the resolution of the documentation.

    A file is replaced only by a complete one.
    """
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110)
