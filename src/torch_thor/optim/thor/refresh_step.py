"""A refresh: the statistics of all processes become new factors and inverses of the layers that are due."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import Candidate, RefreshEvent, refresh
from torch_thor.distributed.statistics import pool
from torch_thor.optim.thor.auto_split import AutoSplit
from torch_thor.optim.thor.gradient_checks import check_statistics
from torch_thor.optim.thor.layer_registry import LayerRegistry
from torch_thor.optim.thor.state import make_state
from torch_thor.optim.thor.step_inputs import StepInputs, look
from torch_thor.optim.thor.summed_loss import looks_summed, message

if TYPE_CHECKING:
    from torch_thor.optim.thor.optimizer import THOR


def refresh_layers(thor: "THOR", inputs: StepInputs) -> None:
    """Make the state that is missing, and take new factors for the layers that are due.

    Args:
        thor: the optimizer.
        inputs: what is known of the step.

    Raises:
        RuntimeError: layers that are due have gradients, and no statistics came of any; nothing has changed.
    """
    registry, groups, states = thor._registry, thor.param_groups, thor.state
    try:
        uncalled = _gather_statistics(thor, inputs) if inputs.due else []
        if not inputs.fits:
            make_state(groups, states, registry.index, registry.layers.values(), thor._rule)
        if inputs.due and not inputs.state_only:
            thor._last_refresh = _take_new_factors(thor, inputs, uncalled)
        thor._fitting = look(groups, states, registry.index)
    except BaseException:  # the sums may be half scaled, or half summed
        registry.capture.discard()
        raise


def _gather_statistics(thor: "THOR", inputs: StepInputs) -> list[tuple[LayerCurvature, str]]:
    """Bring the statistics of all processes together, cut them as was chosen, and find the layers without any."""
    registry = thor._registry
    auto = AutoSplit(thor.param_groups, registry.layers, registry.index)
    auto.from_cache(inputs.processes)
    for layer in inputs.due:
        layer.scale_outputs_(inputs.output_scale)
    pool(inputs.processes, inputs.due, registry.capture.reached, registry.capture.inside_transform)
    uncalled = check_statistics(registry.layers.values(), registry.capture)
    auto.from_statistics(inputs.processes)
    return uncalled


def _take_new_factors(
    thor: "THOR", inputs: StepInputs, uncalled: Sequence[tuple[LayerCurvature, str]]
) -> tuple[RefreshEvent, ...]:
    """Decide on new factors for the layers that are due, and invert what is taken."""
    registry, due, terms = thor._registry, inputs.due, inputs.terms
    _rescale_summed_loss(thor, inputs)
    absence = registry.capture.absence(due, [layer for layer, _ in uncalled])
    events = refresh(
        _candidates(registry, due, terms),
        registry.report,
        relative=thor._rule.relative_damping,
        processes=inputs.processes,
    )
    for layer, what in uncalled:
        registry.report(layer, what)
    registry.capture.finish_refresh(due, events, absence)
    if terms:
        for group in thor.param_groups:
            group["last_loss_terms"] = terms
    return events


def _candidates(registry: LayerRegistry, layers: Sequence[LayerCurvature], terms: int) -> list[Candidate]:
    """Make a candidate of every layer that has rows; their statistics are used up."""
    candidates = []
    for layer in layers:
        weight, rows = layer.weight, layer.rows
        if weight.grad is None:
            continue
        of_groups = layer.fresh_group_terms(terms)
        factors = layer.fresh_factors(terms)
        if factors is None:
            if layer in registry.capture.reached:
                then = "its old inverses stay" if layer.refreshes else "it gets its plain gradient"
                registry.report(layer, f"it saw no rows (an empty batch, or every row masked): {then}")
            continue
        group = registry.index.group(weight)
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


def _rescale_summed_loss(thor: "THOR", inputs: StepInputs) -> None:
    """Divide gradients and statistics of a summed loss by N; whether it is one, the first refresh decides."""
    groups, registry, terms = thor.param_groups, thor._registry, inputs.terms
    if not terms:  # no layer was reached: there is nothing to tell from, and what held before goes on
        return
    first = not any(layer.refreshes for layer in registry.layers.values())
    bounded = any(group["max_update_ratio"] is not None for group in groups)
    told = thor.loss_reduction == "mean" and thor.fisher == "empirical"  # sampled statistics are not the loss's
    if first and bounded and told and looks_summed(inputs.due, terms):
        registry.warnings.note("summed loss", message(terms))
    elif all(group["loss_scale"] == 1.0 for group in groups):
        return
    scale = terms / inputs.processes.count  # ranks have averaged their gradients already
    for group in groups:
        group["loss_scale"] = scale
    for layer in inputs.due:
        layer.scale_outputs_(1.0 / scale)
