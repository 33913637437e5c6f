"""Counts the rows of a step over all ranks, so that A = Σ Σ a aᵀ / Σ R and G = Σ Σ g gᵀ / Σ R."""

from collections.abc import Sequence

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import Processes


def count_rows(
    processes: Processes, layers: Sequence[LayerCurvature], reached: set[LayerCurvature], inside_transform: set[str]
) -> None:
    """Replace the row counts of this process by those of all processes together, with one collective.

    The sums over the rows stay those of this process until a refresh sums up the factors that it takes.

    Args:
        processes: the processes that train together.
        layers: the layers to refresh, the same on every process, also on one that has no rows of a layer. Their output
            gradients must be those of one loss term (``scale_outputs_`` of their statistics), because ranks may
            have different numbers of loss terms.
        reached: the layers that this process has reached in this step; extended by those of all processes.
        inside_transform: the names of the layers that ran under torch.func in this process; extended in the same way.
    """
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
