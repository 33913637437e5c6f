"""The inputs of a step: everything that is read and checked before the step changes anything.

:func:`collect` returns them as one object. If several processes train together,
:mod:`torch_thor.optim.shared_inputs` makes them take the same decisions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from torch_thor.capture.phases import GATHERING, Phase
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.parameter_view import State
from torch_thor.curvature.processes import ALONE, Processes
from torch_thor.curvature.row_shards import local
from torch_thor.intervals import steps_until_next
from torch_thor.optim.gradient_checks import (
    layout_message,
    nonfinite_message,
    nonfinite_names,
    real_elements,
)
from torch_thor.optim.layer_registry import LayerRegistry
from torch_thor.optim.loss_scale import LossScale
from torch_thor.optim.parameter_index import ParameterIndex
from torch_thor.optim.parameters import Group, parameters_with_gradient
from torch_thor.optim.shared_inputs import read_together
from torch_thor.optim.state import conform, creates_state_only
from torch_thor.optim.statistics_checks import check_blocks, check_row_mask, conflicting_terms_message
from torch_thor.optim.thor_options import check_group, check_loss_terms

if TYPE_CHECKING:
    from torch_thor.optim.thor import THOR

# Options that are not numbers. A value that has passed check_group() is checked again only after it was replaced.
_NOT_NUMBERS = (
    "nesterov",
    "kl_clip",
    "max_update_ratio",
    "split_dim",
    "update_interval",
    "trace_thresholds",
    "scaling",
)


@dataclass(frozen=True)
class StepInputs:
    """What is known about a step before it changes anything."""

    due: Sequence[LayerCurvature]
    processes: Processes  # the processes that take their decisions together
    fits: bool  # whether the optimizer state is known to fit the current parameters (:func:`fingerprint`)
    state_only: bool
    waiting: bool  # whether a layer gathers statistics that is trained and, as far as is known, called by the model
    next_refreshes: tuple[int, ...]  # for each parameter group, the step of its next refresh as of the end of this step
    refreshes_next: bool  # whether the next step refreshes a group
    terms: int = 0  # N, the number of loss terms of all processes together; 0 if no layer has counted any
    output_scale: float = 1.0
    largest: float = 0.0  # the largest Euclidean norm of a gradient; 0 without gradients, or if parameters are divided
    decaying: frozenset[int] = frozenset()  # the `id` of each parameter to which weight decay applies in this step
    skipped: bool = False  # whether the step is skipped
    counted: bool = False  # whether it is skipped because a gradient is not finite, so that `skipped_steps` counts it


def fingerprint(groups: Iterable[Group], states: Mapping[Tensor, State], index: ParameterIndex) -> list[Any]:
    """Return everything on which the parameter views of the layers and the optimizer state depend."""
    found: list[Any] = [len(states)]
    for _, attribute, module in index.attributes:
        found.append(id(module._parameters.get(attribute)))
    for group in groups:
        found.append((id(group), group["split_dim"], len(group["params"])))
        for p in group["params"]:
            state = states.get(p)
            buffer = None if state is None else state.get("momentum_buffer")
            shape = None if buffer is None else buffer.shape
            found.append((id(p), p.requires_grad, p.shape, p.dtype, p.device, id(state), shape))
    return found


def collect(thor: "THOR") -> StepInputs:
    """Read and check the inputs of a step, and agree on them with the other processes."""
    groups, states, registry = thor.param_groups, thor.state, thor._registry
    index, capture = registry.index, registry.capture
    fits = thor._fitting is not None and fingerprint(groups, states, index) == thor._fitting
    if not fits:
        thor._fitting = None  # until the state has been checked: the views are bound to it before that
        index.update(groups, states)
    watching, due = capture.watching, []
    if (
        index.computed
        or index.divided_since
        or (watching and not index.owner_ids.issubset(map(id, thor.model.modules())))
    ):
        registry.leave_out_removed(groups, states)
    waiting = False if watching else capture.wanting
    if watching:
        for layer in registry.layers.values():
            phase = capture.phases.get(layer)
            if phase in GATHERING and layer.weight.requires_grad:
                due.append(layer)
                waiting = waiting or phase is Phase.REQUIRED or not layer.uncalled
    state_only = not states and creates_state_only(groups, states)
    processes: Processes = ALONE
    together = (due or _needs_agreement(thor)) and dist.is_available() and dist.is_initialized()
    if not state_only and (thor._group_handle.is_lost or together):
        processes = thor._group_handle.join(thor.model, registry.device)
    read_own = partial(_read, thor, due, processes, fits, state_only, waiting)
    try:
        inputs = read_own() if processes.count == 1 else read_together(thor, processes, read_own)
    except FloatingPointError:
        capture.discard()
        raise
    if not inputs.largest:
        registry.report_nothing_trained(groups)
    if inputs.skipped:
        capture.discard()
        thor.skipped_steps += inputs.counted
    return inputs


def _needs_agreement(thor: "THOR") -> bool:
    """Return whether the processes must agree on every step, and not on refresh steps alone."""
    # They must if the update sends something, because a process that raises or skips leaves the others waiting; and if
    # a step may be skipped, because the process that skips would come to its next refresh later than the others.
    if thor.divide_curvature or thor.nonfinite == "skip":
        return True
    if thor._registry.index.first_shards is None:
        return False
    return thor.whole_matrices or any(group["kl_clip"] is not None for group in thor.param_groups)


def _read(
    thor: "THOR", due: list[LayerCurvature], processes: Processes, fits: bool, state_only: bool, waiting: bool
) -> StepInputs:
    """Return the inputs of this process; raise an error for an option, a state or a gradient that cannot be used."""
    groups, registry = thor.param_groups, thor._registry
    for group in groups:
        if not _is_usual(thor, group):  # checked in every step: a schedule may have changed damping to 0
            check_group(group)
            thor._checked[id(group)] = {name: group[name] for name in _NOT_NUMBERS}
    if not fits:
        conform(groups, thor.state, registry.layers.values(), registry.index)
    check_blocks(due)
    upcoming, refreshes_next = [], False
    for group in groups:
        step, due_at, interval = int(group["step"]), int(group["next_refresh"]), group["update_interval"]
        if step >= due_at and not _gathers(registry, group):
            due_at = step + 1  # next_refresh was set back by hand: the next step has statistics
        elif step >= due_at:
            due_at = step + (steps_until_next(interval, step) if callable(interval) else interval)
        upcoming.append(due_at)
        refreshes_next = refreshes_next or step + 1 >= due_at
    known = due, processes, fits, state_only, waiting, tuple(upcoming), refreshes_next
    # GradScaler sets this attribute before it calls step()
    scale = None if thor.grad_scaler is None and not hasattr(thor, "found_inf") else LossScale(thor, thor.grad_scaler)
    if scale is not None and scale.found_inf:
        return StepInputs(*known, skipped=True)
    sampled = registry.capture.sampler is not None  # then captured gradients are those of single loss terms already
    backward, terms = registry.capture.backward, 0
    given = thor.loss_terms() if callable(thor.loss_terms) else thor.loss_terms
    if given is not None:
        terms = check_loss_terms(given)
    elif due and "G" in registry.sides:
        if backward.first is None:
            _note_conflicting_terms(registry)
        terms = backward.loss_terms
    captured = 1.0
    if scale is not None and not sampled and any(layer.statistics.rows and "G" in layer.sides for layer in due):
        captured = scale.of_outputs()
    decaying: set[int] = set()
    for group in groups:
        for parameter in group["params"] if group["weight_decay"] else ():
            if parameter.grad is not None and (thor.decay_filter is None or thor._decays(parameter)):
                decaying.add(id(parameter))
    if scale is not None:
        scale.unscale_(gradient for _, _, gradient in parameters_with_gradient(groups))
    largest = _largest_gradient(groups, registry.index)
    if not math.isfinite(largest):
        if thor.nonfinite == "skip":
            return StepInputs(*known, skipped=True, counted=True)
        raise FloatingPointError(nonfinite_message(groups[0]["step"], nonfinite_names(groups, registry.index)))
    if due and registry.capture.row_mask is not None:
        check_row_mask(registry.layers.values(), registry.capture)
    output_scale = (terms if terms and thor.loss_reduction == "mean" and not sampled else 1) / captured
    if registry.index.first_shards is not None:
        largest = 0.0  # every process has other rows, whose gradients differ
    return StepInputs(*known, terms, output_scale, largest, frozenset(decaying))


def _gathers(registry: LayerRegistry, group: Group) -> bool:
    """Return whether all layers of a group that have not stopped gather the statistics of this step."""
    of_group = [layer for layer in registry.layers.values() if layer.weight_view.options is group]
    return all(layer.stopped or registry.capture.gathers(layer) for layer in of_group)


def _is_usual(thor: "THOR", group: Group) -> bool:
    """Return whether a group's numbers are Python numbers in range, and its other options have been checked before."""
    lr, weight_decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
    factor_decay, damping, loss_scale = group["factor_decay"], group["damping"], group["loss_scale"]
    for value in (lr, weight_decay, momentum, factor_decay, damping, loss_scale):
        if type(value) is not float and type(value) is not int:
            return False
    checked = thor._checked.get(id(group))
    if checked is None or type(group["trace_thresholds"]) is not tuple:  # a list may have been changed in place
        return False
    for name in _NOT_NUMBERS:
        if group[name] is not checked[name]:
            return False
    in_range = 0 <= lr < math.inf and 0 <= weight_decay < math.inf and 0 <= momentum < 1 and 0 <= factor_decay < 1
    positive = 0 < damping < math.inf and 0 < loss_scale < math.inf
    return in_range and positive and (momentum != 0 or not group["nesterov"])


def _note_conflicting_terms(registry: LayerRegistry) -> None:
    conflict = registry.capture.backward.conflicting_loss_terms
    if conflict is not None:
        message = conflicting_terms_message(*conflict)
        registry.warnings.note(message, message)


def _largest_gradient(groups: list[Group], index: ParameterIndex) -> float:
    """Return the largest Euclidean norm of a gradient; NaN or inf if one is not finite or the step could overflow."""
    batches: dict[tuple[torch.device, bool], list[Tensor]] = {}
    damping = math.inf
    for group in groups:
        damping = min(damping, float(group["damping"]))
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            if gradient.layout not in (torch.strided, torch.sparse_coo):
                raise RuntimeError(layout_message(index.name(parameter), gradient.layout))
            if gradient.numel():
                usual = gradient.layout is torch.strided and not gradient.is_complex()
                numbers = gradient if usual else real_elements(gradient)
                batches.setdefault((numbers.device, numbers.dtype == torch.float64), []).append(numbers)
    largest = 0.0
    for (_, wide), batch in batches.items():
        # not in float16, where norms overflow at 65,504 although every gradient is finite
        norms = torch._foreach_norm(batch, 2, dtype=torch.float64 if wide else torch.float32)
        norm = float(torch.stack(norms).max())
        if not math.isfinite(norm):
            return norm
        largest = max(largest, norm)
    return math.inf if largest / damping > torch.finfo(torch.float32).max else largest
