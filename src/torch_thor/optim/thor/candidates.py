"""From the statistics of a step to what the trace rule decides on."""

from collections.abc import Callable, Collection, Iterable

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import Candidate
from torch_thor.optim.parameters import ParameterIndex


def candidates_of(
    layers: Iterable[LayerCurvature],
    terms: int,
    index: ParameterIndex,
    report: Callable[[LayerCurvature, str], None],
    reached: Collection[LayerCurvature],
) -> list[Candidate]:
    """Make a candidate of every layer that has rows.

    Args:
        layers: those that want new factors; their statistics are used up.
        terms: N.
        index: knows each layer's group.
        report: called with a layer and a sentence on why it has no rows.
        reached: the layers whose calls came in this step, with or without rows.

    Returns:
        The candidates, in order.
    """
    candidates = []
    for layer in layers:
        weight, rows = layer.weight, layer.rows
        if weight.grad is None:
            continue
        of_groups = layer.fresh_group_terms(terms)
        factors = layer.fresh_factors(terms)
        if factors is None:
            if layer in reached:
                then = "its old inverses stay" if layer.refreshes else "it gets its plain gradient"
                report(layer, f"it saw no rows (an empty batch, or every row masked): {then}")
            continue
        group = index.group(weight)
        upper, lower = group["trace_thresholds"]
        candidates.append(
            Candidate(
                layer,
                group["step"],
                factors,
                # without G there is nothing for T to weigh
                rows_per_term=rows / terms if of_groups is None and "G" in layer.sides else 1.0,
                damping=float(group["damping"]),
                thresholds=(float(upper), float(lower)),
                decay=float(group["factor_decay"]),
                group_rows_per_term=of_groups,
            )
        )
    return candidates
