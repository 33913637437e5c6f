"""The statistics of one step, of all ranks together: A = Σ Σ a aᵀ / Σ R and G = Σ Σ g gᵀ / Σ R."""

from collections.abc import Sequence

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import Processes


def pool(
    processes: Processes, layers: Sequence[LayerCurvature], reached: set[LayerCurvature], inside_transform: set[str]
) -> None:
    """Give every process the sums and counts of all of them: two collectives, and one more per dtype and device.

    Args:
        processes: those that train together.
        layers: those whose statistics are wanted, the same on every process, whether or not it has any; their output
            gradients are those of one loss term (:meth:`Statistics.scale_outputs_`), since a rank's share of the
            loss terms may differ.
        reached: the layers whose calls came in this step, here; becomes those of all processes.
        inside_transform: the layers that ran where no statistics can be seen, here; becomes those of all processes.
    """
    ours: list[float] = []
    for layer in layers:
        own = layer.statistics
        ours += [own.rows, layer in reached, layer.name in inside_transform, *own.group_rows]
    totals = iter([sum(column) for column in zip(*processes.gather(ours), strict=True)])
    for layer in layers:
        own = layer.statistics
        own.rows = int(next(totals))
        if next(totals):
            reached.add(layer)
        if next(totals):
            inside_transform.add(layer.name)
        own.group_rows = [int(next(totals)) for _ in own.group_rows]
    processes.sum_(
        [part for one in layers if one.statistics.rows for factor in one.statistics.sums() for part in factor.parts()]
    )
