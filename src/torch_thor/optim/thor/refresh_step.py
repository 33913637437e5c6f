"""A refresh: gather the statistics of all processes, decide layer by layer, invert what is taken, put it to use.

What is gathered comes from :mod:`torch_thor.capture`; :mod:`torch_thor.curvature.refresh` decides and inverts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_thor.capture.capture import Absence
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import Candidate, refresh
from torch_thor.distributed.statistics import pool
from torch_thor.optim.thor.auto_split import AUTO, AutoSplit
from torch_thor.optim.thor.layer_registry import LayerRegistry
from torch_thor.optim.thor.state import make_state
from torch_thor.optim.thor.statistics_checks import check_statistics
from torch_thor.optim.thor.step_inputs import StepInputs, fingerprint
from torch_thor.optim.thor.summed_loss import rescale_summed_loss

if TYPE_CHECKING:
    from torch_thor.optim.thor.optimizer import THOR

_Uncalled = list[
    tuple[LayerCurvature, str]
]  # layers whose weight is used without calling them, and what to say of each


def refresh_layers(thor: "THOR", inputs: StepInputs) -> None:
    """Make the state that is missing, and take new factors for the layers that are due.

    Args:
        thor: the optimizer.
        inputs: what is known of the step.

    Raises:
        RuntimeError: layers that are due have gradients, and no statistics came of any; nothing has changed.
    """
    registry = thor._registry
    try:
        uncalled = _gather(thor, inputs) if inputs.due else []
        if not inputs.fits:
            make_state(thor.param_groups, thor.state, registry.index, registry.layers.values(), thor._rule)
            thor._fitting = fingerprint(thor.param_groups, thor.state, registry.index)
        if inputs.due and not inputs.state_only:
            _take_new_factors(thor, inputs, uncalled)
    except BaseException:  # the sums may be half scaled, or half summed
        registry.capture.discard()
        raise


def _gather(thor: "THOR", inputs: StepInputs) -> _Uncalled:
    """Bring the statistics of all processes together, cut them as was chosen, and find the layers without any."""
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
        pool(inputs.processes, inputs.due, capture.reached, capture.inside_transform)
    uncalled: _Uncalled = []
    if not capture.reached.issuperset(inputs.due):
        uncalled = check_statistics(registry.layers.values(), capture)
    if auto is not None:
        auto.from_statistics(inputs.processes)
    return uncalled


def _take_new_factors(thor: "THOR", inputs: StepInputs, uncalled: _Uncalled) -> None:
    """Decide on new factors for the layers that are due, and invert what is taken."""
    registry, due, terms = thor._registry, inputs.due, inputs.terms
    if terms and _may_be_summed(thor):
        rescale_summed_loss(thor, inputs)  # without N no layer was reached: what held before goes on
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
    """Return whether the loss has been found to be a sum, or that is to be found out now, in the first refresh."""
    found = refreshed = False
    for group in thor.param_groups:
        found = found or group["loss_scale"] != 1.0
    for layer in thor._registry.layers.values():
        refreshed = refreshed or layer.refreshes > 0
    return found or not refreshed


def _candidates(registry: LayerRegistry, layers: Sequence[LayerCurvature], terms: int) -> list[Candidate]:
    """Make a candidate of every layer that has rows; its statistics become the candidate's factors."""
    candidates = []
    for layer in layers:
        options, rows = layer.weight_view.options, layer.statistics.rows
        if layer.weight.grad is None:
            continue
        if layer.kind.routed:
            group_terms, factors = layer.fresh_group_terms(terms), layer.fresh_factors(terms)
        else:
            group_terms, factors = None, layer.statistics.means()
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
                # without G there is nothing for T to weigh
                rows_per_term=rows / terms if group_terms is None and len(factors) > 1 else 1.0,
                damping=float(options["damping"]),
                thresholds=(float(upper), float(lower)),
                decay=float(options["factor_decay"]),
                group_rows_per_term=group_terms,
            )
        )
    return candidates


def prepare_next_step(thor: "THOR", inputs: StepInputs) -> None:
    """Have the next step gather what it will refresh, and drop what a step that was no refresh has gathered.

    Args:
        thor: the optimizer; its groups have counted the step.
        inputs: what was known of the step.
    """
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
    else:
        registry.capture.listen()
