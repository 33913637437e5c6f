"""The refresh in a step: layers that are due take new factors, from the statistics of all processes.

Statistics have been gathered by :mod:`torch_thor.capture`. :mod:`torch_thor.curvature.refresh` applies the trace rule
to each layer and inverts the new factors.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import Processes
from torch_thor.curvature.refresh import Candidate, refresh
from torch_thor.distributed.agreement import count_rows
from torch_thor.optim.report import note_layer
from torch_thor.optim.statistics_checks import check_statistics
from torch_thor.optim.step import Inputs, make_state

if TYPE_CHECKING:
    from torch_thor.optim.base import CurvatureOptimizer


def refresh_layers(optimizer: "CurvatureOptimizer", inputs: Inputs, state_only: bool) -> None:
    """Create missing state, and take new factors for the layers that are due."""
    capture, due, processes = optimizer._capture, inputs.due, inputs.processes
    try:
        silent: list[tuple[LayerCurvature, str]] = []
        if due:
            if inputs.output_scale != 1.0:
                for layer in due:
                    layer.statistics.scale_outputs_(inputs.output_scale)
            if processes.count > 1:
                count_rows(processes, due, capture.reached, capture.inside_transform)
            if not state_only and not capture.reached.issuperset(due):
                silent = check_statistics(optimizer._plan.layers.values(), capture)
        if not optimizer._complete:
            make_state(optimizer, divided=not state_only)
        if due and not state_only:
            _note_summed_loss(optimizer, inputs)
            optimizer._last_refresh = refresh(
                _candidates(optimizer, due, inputs.terms),
                partial(note_layer, optimizer),
                relative=optimizer.relative_damping,
                processes=processes,
            )
            optimizer._plan.program = None  # it holds what the refresh has changed
            for layer, what in silent:
                note_layer(optimizer, layer, what)
            capture.finish_refresh(due, optimizer._last_refresh, [layer for layer, _ in silent])
            for group in optimizer.param_groups if inputs.terms else ():
                group["last_loss_terms"] = inputs.terms
    except BaseException:  # the statistics may be partly scaled, or partly summed over processes
        capture.discard()
        raise


def _candidates(optimizer: "CurvatureOptimizer", layers: Sequence[LayerCurvature], terms: int) -> list[Candidate]:
    """Return a candidate for each layer that has rows; the memory of its statistics becomes that of its factors."""
    candidates = []
    for layer in layers:
        options, rows = layer.weight_view.options, layer.statistics.rows
        if layer.weight_view.parameter.grad is None:
            continue
        group_terms, without_rows, group_rows = None, [], layer.statistics.group_rows
        if group_rows:
            without_rows = [not own for own in group_rows] if layer.refreshes else []
            if "G" in layer.sides:
                before = layer.state[layer.prefix + "group_rows_per_term"]
                now = before.new_tensor(group_rows) / terms
                group_terms = torch.where(now > 0, now, before)
        factors = layer.statistics.take(terms)
        if factors is None:
            if layer in optimizer._capture.reached:
                then = "its old inverses stay" if layer.refreshes else "it gets its plain gradient"
                note_layer(optimizer, layer, f"it saw no rows (an empty batch, or every row masked): {then}")
            continue
        thresholds = options.get("trace_thresholds", optimizer.trace_thresholds)
        candidates.append(
            Candidate(
                layer,
                options["step"],
                factors,
                # T weights the product of A and G, so it is 1 for a layer without G
                rows_per_term=rows / terms if group_terms is None and len(factors) > 1 else 1.0,
                damping=float(options["damping"]),
                thresholds=(float(thresholds[0]), float(thresholds[1])),
                decay=float(options["factor_decay"]),
                group_rows_per_term=group_terms,
                without_rows=without_rows,
            )
        )
    return candidates


# RMS output gradients of a sum that is given as a mean: in the median layer, and relative to N. Those of a mean of
# log-likelihoods or of standardised squared errors are about 1 or less in every layer, those of the sum N times that.
_MEDIAN_OF_A_SUM, _MEDIAN_PER_TERM, _LARGEST_PER_TERM = 10.0, 0.05, 3.0


def _note_summed_loss(optimizer: "CurvatureOptimizer", inputs: Inputs) -> None:
    """Warn, in the first refresh, of a loss that looks like a sum over the batch although it is to be a mean."""
    # N² times too large a Fisher matrix makes damping void and the natural gradient N times too short
    layers, terms = optimizer._plan.layers.values(), inputs.terms
    comparable = "G" in optimizer.sides and optimizer.loss_reduction == "mean" and optimizer.fisher == "empirical"
    if not comparable or terms < 2 or any(layer.refreshes for layer in layers):
        return
    squares = _mean_squares(inputs.due, inputs.processes)
    if not squares:
        return
    middle, largest = (math.sqrt(max(0.0, square)) for square in (statistics.median_low(squares), max(squares)))
    if middle > max(_MEDIAN_OF_A_SUM, _MEDIAN_PER_TERM * terms) and largest <= _LARGEST_PER_TERM * terms:
        message = (
            f"{type(optimizer).__name__}: the gradients are so large that the loss looks like a sum over the {terms} "
            f'loss terms of the batch, not their mean; pass loss_reduction="sum", or average the loss over the batch. '
            f"If it is an average, bring its targets to a scale of about 1"
        )
        optimizer._warnings.note("summed loss", message)


def _mean_squares(layers: Iterable[LayerCurvature], processes: Processes) -> list[float]:
    """Return the mean square of the output gradients of each layer."""
    means: list[torch.Tensor] = []
    for layer in layers:
        sums = layer.statistics.gathered()
        if sums is not None:
            groups = 1 if layer.kind.routed else layer.kind.groups  # a row of routed experts belongs to one group
            mean = sums[1].traces().sum() / (layer.statistics.rows * groups * layer.kind.outputs)
            means.append(mean.to(means[0]) if means else mean)
    if not means:
        return []
    return [sum(of_processes) for of_processes in zip(*processes.gather(torch.stack(means).tolist()), strict=True)]
