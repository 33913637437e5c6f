"""The refresh in a step: layers that are due take new factors, from the statistics of all processes.

Statistics have been gathered by :mod:`torch_thor.capture`. :mod:`torch_thor.curvature.refresh` applies the trace rule
to each layer and inverts the new factors.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_thor.capture.capture import Absence
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import Candidate, refresh
from torch_thor.distributed.statistics import count_rows
from torch_thor.optim.auto_split import AUTO, AutoSplit
from torch_thor.optim.divided_curvature import divide
from torch_thor.optim.layer_registry import LayerRegistry
from torch_thor.optim.state import make_state
from torch_thor.optim.statistics_checks import check_statistics
from torch_thor.optim.step_inputs import StepInputs, fingerprint
from torch_thor.optim.summed_loss import rescale_summed_loss

if TYPE_CHECKING:
    from torch_thor.optim.thor import THOR

# the layers whose weights are used without calling their modules, each with a sentence for a warning
_Uncalled = list[tuple[LayerCurvature, str]]


def refresh_layers(thor: "THOR", inputs: StepInputs) -> None:
    """Create missing state, and take new factors for the layers that are due."""
    registry = thor._registry
    try:
        uncalled = _gather(thor, inputs) if inputs.due else []
        if not inputs.fits:
            if thor.divide_curvature and not inputs.state_only:
                divide(list(registry.layers.values()), thor._processes())
            make_state(thor.param_groups, thor.state, registry.index, registry.layers.values(), thor._rule)
            thor._fitting = fingerprint(thor.param_groups, thor.state, registry.index)
        if inputs.due and not inputs.state_only:
            _take_new_factors(thor, inputs, uncalled)
    except BaseException:  # the statistics may be partly scaled, or partly summed over processes
        registry.capture.discard()
        raise


def _gather(thor: "THOR", inputs: StepInputs) -> _Uncalled:
    """Count the rows of all processes, choose the split dimension if it is "auto", and find uncalled layers."""
    registry, capture, auto = thor._registry, thor._registry.capture, None
    for group in thor.param_groups:
        if group["split_dim"] == AUTO:
            auto = AutoSplit(thor.param_groups, registry.layers)
            auto.from_cache(inputs.processes)
            break
    if inputs.output_scale != 1.0:
        for layer in inputs.due:
            layer.statistics.scale_outputs_(inputs.output_scale)
    if inputs.processes.count > 1:
        count_rows(inputs.processes, inputs.due, capture.reached, capture.inside_transform)
    uncalled: _Uncalled = []
    if not inputs.state_only and not capture.reached.issuperset(inputs.due):
        uncalled = check_statistics(registry.layers.values(), capture)
    if auto is not None:
        auto.from_statistics(inputs.processes)
    return uncalled


def _take_new_factors(thor: "THOR", inputs: StepInputs, uncalled: _Uncalled) -> None:
    """Apply the trace rule to the layers that are due, and invert the new factors."""
    registry, due, terms = thor._registry, inputs.due, inputs.terms
    if terms and _may_be_summed(thor):  # if N is 0, the loss has reached no layer, and the loss scale stays
        rescale_summed_loss(thor, inputs)
    absence = Absence()
    if not registry.capture.reached.issuperset(due):
        absence = registry.capture.absence(due, [layer for layer, _ in uncalled])
    thor._last_refresh = refresh(
        _candidates(registry, due, terms),
        registry.report,
        relative=thor._rule.relative_damping,
        processes=inputs.processes,
    )
    for layer, what in uncalled:
        registry.report(layer, what)
    registry.capture.finish_refresh(due, thor._last_refresh, absence)
    if terms:
        for group in thor.param_groups:
            group["last_loss_terms"] = terms


def _may_be_summed(thor: "THOR") -> bool:
    """Return whether the loss has been found to be a sum, or this is the first refresh, which finds out."""
    found = refreshed = False
    for group in thor.param_groups:
        found = found or group["loss_scale"] != 1.0
    for layer in thor._registry.layers.values():
        refreshed = refreshed or layer.refreshes > 0
    return found or not refreshed


def _candidates(registry: LayerRegistry, layers: Sequence[LayerCurvature], terms: int) -> list[Candidate]:
    """Return a candidate for each layer that has rows; the memory of its statistics becomes that of its factors."""
    candidates = []
    for layer in layers:
        options, rows = layer.weight_view.options, layer.statistics.rows
        if layer.weight_view.parameter.grad is None:
            continue
        if layer.kind.routed:
            group_terms, without_rows = layer.fresh_group_terms(terms), layer.groups_without_rows()
            factors = layer.fresh_factors(terms)
        else:
            group_terms, without_rows, factors = None, [], layer.statistics.means()
        if factors is None:
            if layer in registry.capture.reached:
                then = "its old inverses stay" if layer.refreshes else "it gets its plain gradient"
                registry.report(layer, f"it saw no rows (an empty batch, or every row masked): {then}")
            continue
        upper, lower = options["trace_thresholds"]
        candidates.append(
            Candidate(
                layer,
                options["step"],
                factors,
                # T weights the product of A and G, so it is 1 for a layer without G
                rows_per_term=rows / terms if group_terms is None and len(factors) > 1 else 1.0,
                damping=float(options["damping"]),
                thresholds=(float(upper), float(lower)),
                decay=float(options["factor_decay"]),
                group_rows_per_term=group_terms,
                without_rows=without_rows,
            )
        )
    return candidates


def prepare_next_step(thor: "THOR", inputs: StepInputs) -> None:
    """Register the hooks that the next step needs, and drop unused statistics of this step."""
    registry = thor._registry
    if inputs.waiting and not inputs.due:
        registry.capture.finish_step()
    wanted = []
    for layer in registry.layers.values():
        options = layer.weight_view.options
        if options["step"] >= options["next_refresh"]:
            wanted.append(layer)
    if wanted:
        registry.capture.want(wanted)
    if registry.replacement is not None:
        registry.watch_replacement(thor.param_groups, thor.state)
        thor._fitting = None  # the next step makes their state
    else:
        registry.capture.listen()
