"""What the pictures of all comparisons share: colours, a line with its range, notes, and their resolution."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_thor.training.reports.pictures import save_picture

if TYPE_CHECKING:  # slow to import, and no window is wanted
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# told apart by all eyes (Okabe and Ito), the baseline in grey
COLOURS = {"momentum": "#666666", "thor": "#0072b2", "thor_stop": "#009e73", "thor_nt": "#d55e00"}
COLOURS |= {"lamb": COLOURS["momentum"], "thor-spectral": COLOURS["thor_stop"]}
STYLES = {"thor_stop": "--"}  # it often lies on thor


def draw_band(
    axes: "Axes",
    xs: Sequence[float],
    series: Sequence[Sequence[float]],
    *,
    label: str,
    colour: Any = None,
    marker: str | None = None,
    style: str = "-",
    shade: float = 0.2,
    middle: Callable[[Sequence[float]], float] = statistics.fmean,
) -> None:
    """Draw the middle of some series as a line, and behind it the range from the lowest to the highest.

    Args:
        axes: Where.
        xs: One number per point.
        series: For each seed one number per point.
        label: For the legend.
        colour: Of both, as matplotlib has it; `None` takes the next.
        marker: Of the points.
        style: Of the line.
        shade: How dark the range is, in [0, 1].
        middle: Of the values at one point.
    """
    columns = list(zip(*series, strict=True))
    (line,) = axes.plot(xs, [middle(column) for column in columns], label=label, color=colour, marker=marker, ls=style)
    if len(series) > 1:
        axes.fill_between(xs, [min(c) for c in columns], [max(c) for c in columns], color=line.get_color(), alpha=shade)


def note(figure: "Figure", text: str) -> None:
    """Write what is not ours, or must not be overlooked, below the axes.

    Args:
        figure: The figure.
        text: One line or more.
    """
    figure.supxlabel(text, fontsize=8, color="#444444")


def save(figure: "Figure", path: Path) -> None:
    """Replace a picture as a whole, in the resolution of the documentation.

    Args:
        figure: The figure.
        path: The PNG to write.
    """
    save_picture(figure, path, dpi=110)
