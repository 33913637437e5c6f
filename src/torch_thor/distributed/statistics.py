"""Counts the rows of a step over all ranks, so that A = Σ Σ a aᵀ / Σ R and G = Σ Σ g gᵀ / Σ R."""

from collections.abc import Sequence

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import Processes


def count_rows(
    processes: Processes, layers: Sequence[LayerCurvature], reached: set[LayerCurvature], inside_transform: set[str]
) -> None:
    """Replace the row counts of this process by those of all processes together, with one collective."""
    counts: list[float] = []
    for layer in layers:
        own = layer.statistics
        counts += [own.rows, layer in reached, layer.name in inside_transform, *own.group_rows]
    totals = iter([sum(column) for column in zip(*processes.gather(counts), strict=True)])
    for layer in layers:
        own = layer.statistics
        own.rows = int(next(totals))
        if next(totals):
            reached.add(layer)
        if next(totals):
            inside_transform.add(layer.name)
        own.group_rows = [int(next(totals)) for _ in own.group_rows]
        if own.rows:
            own.sums()  # zeros on a process without rows, which takes part in the sum
