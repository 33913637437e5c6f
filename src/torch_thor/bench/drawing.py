"""Drawing functions that the pictures of all comparisons share."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_thor.files import whole_file

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colours that people with colour vision deficiency can distinguish (Okabe and Ito); the baseline is grey
COLOURS = {"momentum": "#666666", "thor": "#0072b2", "thor_stop": "#009e73", "thor_nt": "#d55e00"}
COLOURS |= {"lamb": COLOURS["momentum"], "thor-muon": COLOURS["thor_stop"]}
COLOURS["thor-spectral"] = COLOURS["thor-muon"]  # its name in raw data
STYLES = {"thor_stop": "--"}  # dashed, because its curve often coincides with that of thor


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
    """Draw the mean of some series as a line, and the range from the lowest to the highest value behind it."""
    columns = list(zip(*series, strict=True))
    (line,) = axes.plot(xs, [middle(column) for column in columns], label=label, color=colour, marker=marker, ls=style)
    if len(series) > 1:
        axes.fill_between(xs, [min(c) for c in columns], [max(c) for c in columns], color=line.get_color(), alpha=shade)


def note(figure: "Figure", text: str) -> None:
    """Write a note below the axes, such as the source of numbers that were not measured here."""
    figure.supxlabel(text, fontsize=8, color="#444444")


def save(figure: "Figure", path: Path) -> None:
    """Write a picture in the resolution of the documentation; a file is replaced only by a complete one."""
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110)
