"""A plot of the decisions of the trace rule per layer and step, and of the traces on which they depend."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_thor.training.engine.history import History, RefreshPoint
from torch_thor.training.reports.pictures import save_picture

COLOURS = {
    "update": "#0072b2",
    "keep": "#d3e4f2",
    "stop": "#bbbbbb",
    "failed": "#d55e00",
}  # colour-blind safe
MEANING = {
    "update": "new factors taken",
    "keep": "old factors kept",
    "stop": "stopped permanently",
    "failed": "not invertible",
}
MOST_NAMED = 60  # with more layers, their names would overlap
MOST_IN_LEGEND = 16  # with more layers, the legend would be too long


def draw_refreshes(record: History, layers: Sequence[str], path: Path) -> None:
    """Draw a row of decisions for each layer, and below them the trace of each layer over time.

    Args:
        record: The record of the run.
        layers: Names of the layers with curvature, in the order of the model.
        path: The file to write; its suffix determines the format.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # slow to import; without pyplot, which may open windows
    from matplotlib.patches import Patch

    rows_height = min(12.0, 0.8 + 0.25 * len(layers))
    figure = Figure(figsize=(10, rows_height + 3.6), layout="constrained")
    rows, traces = figure.subplots(2, 1, sharex=True, height_ratios=[rows_height, 3.4])
    seen = {point.decision for point in record.refreshes}
    for place, layer in enumerate(layers):
        points = [point for point in record.refreshes if point.layer == layer]
        spans = list(_spans(points, len(record.steps) + 1))
        rows.broken_barh(spans, (place - 0.4, 0.8), facecolors=[COLOURS[p.decision] for p in points], linewidth=0)
        colour = colormaps["viridis"](place / max(1, len(layers) - 1))
        known = [point for point in points if point.trace]
        traces.plot(
            [p.step for p in known], [p.trace for p in known], color=colour, marker=".", ms=3, lw=1, label=layer
        )
    named = range(len(layers)) if len(layers) <= MOST_NAMED else ()
    rows.set_yticks(list(named), [layers[i] for i in named], fontsize=8)
    rows.set(ylim=(len(layers) - 0.5, -0.5), title="Decision of each refresh, until the next one", ylabel="layer")
    handles = [Patch(color=COLOURS[decision], label=text) for decision, text in MEANING.items() if decision in seen]
    rows.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4, fontsize=8, frameon=False)
    traces.set(xlabel="step", ylabel="tr(F + λI), new statistics")
    if any(0 < point.trace < math.inf for point in record.refreshes if point.trace):
        traces.set_yscale("log")  # without a positive value, as where every step was skipped, it is an error
    traces.grid(alpha=0.3)
    if len(layers) <= MOST_IN_LEGEND:
        traces.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)
    save_picture(figure, path, dpi=100)


def _spans(points: Sequence[RefreshPoint], end: int) -> Iterator[tuple[int, int]]:
    """Yield the range of each decision, up to the layer's next one: its first step and its length in steps."""
    for start, following in itertools.pairwise([*(point.step for point in points), end]):
        yield start, following - start
