"""The refresh in a step: due layers take new factors, from the statistics of all processes.

Statistics have been gathered by :mod:`torch_thor.capture`. :mod:`torch_thor.curvature.refresh`
applies the trace rule to each layer and inverts the new factors.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from torch_thor.capture.gathering import Capture
from torch_thor.capture.patterns import some
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import Candidate, refresh
from torch_thor.distributed.agreement import count_rows
from torch_thor.distributed.divided import divide
from torch_thor.optim.report import note_layer
from torch_thor.optim.step import Inputs, fingerprint

if TYPE_CHECKING:
    from torch_thor.optim.base import CurvatureOptimizer


def refresh_layers(optimizer: "CurvatureOptimizer", inputs: Inputs, state_only: bool) -> None:
    """Create missing state, and take new factors for the layers that are due."""
    capture, due, processes = optimizer._capture, inputs.due, inputs.processes
    try:
        silent: list[tuple[LayerCurvature, str]] = []
        if due:
            scale = inputs.output_scale  # turns gradients of outputs into those of one loss term
            for layer in due if scale != 1.0 else ():
                for g_sum in layer.statistics.sums()[1:] if layer.statistics.rows else ():
                    # in two products, because scale² can overflow float32 if the loss is scaled for
                    # half precision
                    g_sum.rows.mul_(scale).mul_(scale)
            if processes.count > 1:
                count_rows(processes, due, capture.reached, capture.inside_transform)
            if not state_only and not capture.reached.issuperset(due):
                silent = _silent_layers(optimizer._plan.layers.values(), capture)
        if not optimizer._complete:
            _make_state(optimizer, divided=not state_only)
        if due and not state_only:
            if inputs.terms > 1 and not any(
                layer.refreshes for layer in optimizer._plan.layers.values()
            ):
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


def _make_state(optimizer: "CurvatureOptimizer", *, divided: bool) -> None:
    """Create all state that is missing, in the first step and after parameters were added."""
    # All entries are created at once, so that a checkpoint has the same keys on every rank and at
    # every time. They are not created with the optimizer, because wrappers may replace the
    # parameters after that.
    plan = optimizer._plan
    layers = list(plan.layers.values())
    if optimizer.distributed.divide_curvature and divided:
        divide(layers, optimizer.distributed.processes(plan))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                state = optimizer.state[parameter]
                # torch.distributed.checkpoint reports a parameter without state as missing
                state.setdefault("preconditioned", int(id(parameter) in plan.shares_of))
                optimizer._make_parameter_state(parameter, state, group)
    plan.bind(optimizer.state)
    for layer in layers:
        layer.make_state()
    plan.fingerprint = fingerprint(optimizer, plan)
    optimizer._complete = True


def _candidates(
    optimizer: "CurvatureOptimizer", layers: Sequence[LayerCurvature], terms: int
) -> list[Candidate]:
    """Return a candidate for each layer that has rows."""
    # The memory of its statistics becomes that of its factors.
    candidates = []
    for layer in layers:
        options, rows = layer.weight_view.options, layer.statistics.rows
        if layer.weight.grad is None:
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
                note_layer(
                    optimizer,
                    layer,
                    f"it saw no rows (an empty batch, or every row masked): {then}",
                )
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


# RMS output gradients of a sum that is given as a mean: in the median layer, and relative to N.
# Those of a mean of log-likelihoods or of standardised squared errors are about 1 or less in every
# layer, those of the sum N times that.
_MEDIAN_OF_A_SUM, _MEDIAN_PER_TERM, _LARGEST_PER_TERM = 10.0, 0.05, 3.0


def _note_summed_loss(optimizer: "CurvatureOptimizer", inputs: Inputs) -> None:
    """Warn of a loss that looks like a sum over the batch although it is to be a mean."""
    # N² times too large a Fisher matrix makes damping void and the natural gradient N times too
    # short
    if (
        "G" not in optimizer.sides
        or optimizer.loss_reduction == "sum"
        or optimizer.fisher == "sampled"
    ):
        return
    means: list[torch.Tensor] = []  # the mean square of the output gradients of each layer
    for layer in inputs.due:
        rows = layer.statistics.rows
        if rows:
            # a row of routed experts belongs to one group
            groups = 1 if layer.kind.routed else layer.kind.groups
            mean = layer.statistics.sums()[1].traces().sum() / (rows * groups * layer.kind.outputs)
            means.append(mean.to(means[0]) if means else mean)
    if not means:
        return
    of_processes = inputs.processes.gather(torch.stack(means).tolist())
    squares = [max(0.0, sum(of_layer)) for of_layer in zip(*of_processes, strict=True)]
    middle, largest = (
        math.sqrt(square) for square in (statistics.median_low(squares), max(squares))
    )
    terms = inputs.terms
    if (
        middle > max(_MEDIAN_OF_A_SUM, _MEDIAN_PER_TERM * terms)
        and largest <= _LARGEST_PER_TERM * terms
    ):
        message = (
            f"{type(optimizer).__name__}: the gradients are so large that the loss looks like a "
            f"sum over the {terms} "
            f'loss terms of the batch, not their mean; pass loss_reduction="sum", or average '
            f"the loss over the batch. "
            f"If it is an average, bring its targets to a scale of about 1"
        )
        optimizer._warnings.note("summed loss", message)


# ---- statistics that are missing ----


def _silent_layers(
    layers: Collection[LayerCurvature], capture: Capture
) -> list[tuple[LayerCurvature, str]]:
    """Return the layers without statistics, and why."""
    # Raise an error if no layer has any on any process.
    required = [layer for layer in layers if layer in capture.awaited]
    silent = [
        layer
        for layer in required
        if layer not in capture.reached and layer.weight_view.has_gradient()
    ]
    inside, sampler = capture.inside_transform, capture.sampler
    if not silent or any(layer in capture.reached for layer in layers):
        found = []
        for layer in silent:
            cause = "its weight is used without calling the module"
            if layer.name in inside:
                cause = "it ran inside a torch.func transform, where they cannot be seen"
            elif sampler is not None:
                cause = (
                    "the output given to sample_fisher() does not depend on it, or its module is "
                    "not called"
                )
            then = "keeps the inverses that it has" if layer.refreshes else "is trained plainly"
            what = (
                f"it has a gradient and no statistics: {cause}. It {then} from now on, unless "
                f"statistics come in a later refresh; layers= leaves it out from the start"
            )
            found.append((layer, what))
        return found
    transformed = some([layer.name for layer in silent if layer.name in inside])
    message = _NOTHING_SEEN.format(some([layer.name for layer in silent]))
    if transformed:
        message = (
            f"layers {transformed} ran inside a torch.func transform, where their statistics "
            "cannot be seen; take the gradients of refresh steps with loss.backward(), or leave "
            "the layers out with layers="
        )
    elif sampler is not None and sampler.passes:
        message = _OTHER_OUTPUT
    elif sampler is not None:
        message = _NONFINITE_OUTPUT if sampler.nonfinite else _NOT_SAMPLED
    capture.discard()
    capture.listen(unseen=True)
    raise RuntimeError(message)


_NOTHING_SEEN = (
    "layers {} have gradients and no statistics, and so has every other layer, because no forward "
    "and backward pass through them was seen since the last step: step() was called again without "
    "another loss.backward(), the gradients were set without a forward pass or made before THOR "
    "was, a compiled or copied model ran in the place of the one that THOR has, or the weights "
    "were used without calling the modules. Call loss.backward() on what this model returns before "
    "each step(), and zero_grad() after it; or leave the layers out with layers="
)
_OTHER_OUTPUT = (
    "the output given to sample_fisher() depends on no layer that waits for statistics: it was "
    "computed by a compiled or copied model in the place of the one that THOR has, or before THOR "
    "was made. Give what this model returned in this step"
)
_NONFINITE_OUTPUT = (
    "the output given to sample_fisher() held NaN or inf where the loss does not, so no labels "
    "could be drawn from it; give the part of it that the loss depends on"
)
_NOT_SAMPLED = (
    'this step refreshes, and fisher="sampled" has no statistics for it: call '
    "optimizer.sample_fisher(output) in each "
    "step, between the forward pass and loss.backward(), with what the model returned; or make the "
    "optimizer with "
    'fisher="empirical"'
)
