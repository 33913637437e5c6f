"""What a step knows before it changes anything: gathered in one place, into one object.

How several processes come to know the same is in :mod:`torch_thor.optim.thor.shared_inputs`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from torch_thor.capture.phases import GATHERING, Phase
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.parameter_view import State
from torch_thor.curvature.processes import ALONE, Processes
from torch_thor.optim.parameters import Group, with_gradient
from torch_thor.optim.thor.gradient_checks import (
    layout_message,
    nonfinite_message,
    nonfinite_names,
    numbers_of,
)
from torch_thor.optim.thor.intervals import steps_until_next
from torch_thor.optim.thor.layer_registry import LayerRegistry
from torch_thor.optim.thor.loss_scale import LossScale
from torch_thor.optim.thor.options import check_group, check_loss_terms
from torch_thor.optim.thor.parameter_index import ParameterIndex
from torch_thor.optim.thor.shared_inputs import read_together
from torch_thor.optim.thor.state import conform, is_only_asked_for
from torch_thor.optim.thor.statistics_checks import check_row_mask, conflicting_terms_message

if TYPE_CHECKING:
    from torch_thor.optim.thor.optimizer import THOR

# Options that are not numbers in a range: a value that was found right stays right until it is replaced.
_OTHERS = (
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
    """What is known of a step.

    Args:
        due: the layers that refresh, the same on every process, whichever of them has their rows.
        processes: those that decide together: on a refresh step all that train together; else this one alone, because
            then they have the same gradients and nothing else to agree on.
        fits: whether the state is known to fit the model as it is (:func:`fingerprint`).
        waiting: whether statistics of some layer are wanted and can come.
        state_only: whether torch.distributed.checkpoint asks for the state, and nothing may move.
        terms: N, of this process; of all of them once they have agreed. 0 where no layer has counted.
        output_scale: what turns this process's output gradients into gradients of one loss term.
        next_refreshes: the step of each group's next refresh, as it will be after this step.
        refreshes_next: whether the next step refreshes a group.
        skipped: the step is not taken.
        counted: it is not taken because a gradient is not finite, which ``skipped_steps`` counts.
        largest: the largest norm of a gradient.
        decaying: ``id`` of the parameters to which weight decay applies in this step.
    """

    due: Sequence[LayerCurvature]
    processes: Processes
    fits: bool
    state_only: bool
    waiting: bool
    terms: int = 0
    output_scale: float = 1.0
    next_refreshes: tuple[int, ...] = ()
    refreshes_next: bool = False
    skipped: bool = False
    counted: bool = False
    largest: float = 0.0
    decaying: frozenset[int] = frozenset()


def fingerprint(groups: Iterable[Group], states: Mapping[Tensor, State], index: ParameterIndex) -> list[Any]:
    """Return all that the layers' views and the optimizer's state depend on, cheap enough for every step.

    Args:
        groups: the optimizer's parameter groups.
        states: its state.
        index: knows the model's parameters.

    Returns:
        Identities, shapes, precisions, devices and block sizes; two equal results mean that nothing has changed.
    """
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
    """Look at what this process has for the step, and come to know the same as all others.

    The statistics of a step that is not taken are dropped, and a step with gradients that are not finite is counted.

    Args:
        thor: the optimizer.

    Returns:
        This process's inputs, with the decisions and the loss terms of all.

    Raises:
        FloatingPointError: a gradient holds NaN or inf.
        RuntimeError: the state does not fit the model, or the processes differ.
        ValueError: an option is out of range.
    """
    groups, states, registry = thor.param_groups, thor.state, thor._registry
    index, capture = registry.index, registry.capture
    fits = thor._fitting is not None and fingerprint(groups, states, index) == thor._fitting
    if not fits:
        thor._fitting = None  # the views may be given what turns out not to fit
        index.update(groups, states)
    watching, due = capture.watching, []
    if index.computed or (watching and not index.owner_ids.issubset(map(id, thor.model.modules()))):
        registry.leave_out_removed(groups, states)
    waiting = False if watching else capture.wanting
    if watching:
        for layer in registry.layers.values():
            phase = capture.phases.get(layer)
            if phase in GATHERING and layer.weight.requires_grad:
                due.append(layer)
                waiting = waiting or phase is Phase.REQUIRED or not layer.uncalled
    state_only = not states and is_only_asked_for(groups, states)
    processes: Processes = ALONE
    if not state_only and (thor._group_handle.is_lost or (due and dist.is_available() and dist.is_initialized())):
        processes = thor._group_handle.join(thor.model, registry.device)
    inputs = StepInputs(due, processes, fits, state_only, waiting)
    try:
        inputs = _read(thor, inputs) if processes.count == 1 else read_together(thor, inputs, _read)
    except FloatingPointError:
        capture.discard()
        raise
    if inputs.skipped:
        capture.discard()
        thor.skipped_steps += inputs.counted
    return inputs


def _read(thor: "THOR", inputs: StepInputs) -> StepInputs:
    """Look at what this process has for the step, and raise what is wrong with it."""
    groups, registry = thor.param_groups, thor._registry
    for group in groups:
        if not _is_usual(thor, group):  # again: a schedule may have run damping down to 0
            check_group(group)
            thor._checked[id(group)] = {name: group[name] for name in _OTHERS}
    if not inputs.fits:
        conform(groups, thor.state, registry.layers.values(), registry.index)
    upcoming, refreshes_next = [], False
    for group in groups:
        step, due_at, interval = int(group["step"]), int(group["next_refresh"]), group["update_interval"]
        if step >= due_at:
            due_at = step + (steps_until_next(interval, step) if callable(interval) else interval)
        upcoming.append(due_at)
        refreshes_next = refreshes_next or step + 1 >= due_at
    inputs = replace(inputs, next_refreshes=tuple(upcoming), refreshes_next=refreshes_next)
    # a GradScaler says by this attribute that it wants to be asked
    scale = None if thor.grad_scaler is None and not hasattr(thor, "found_inf") else LossScale(thor, thor.grad_scaler)
    if scale is not None and scale.found_inf:
        return replace(inputs, skipped=True)
    sampled = registry.capture.sampler is not None  # their gradients are those of single terms as they are
    backward, terms = registry.capture.backward, 0
    given = thor.loss_terms() if callable(thor.loss_terms) else thor.loss_terms
    if given is not None:
        terms = check_loss_terms(given)
    elif inputs.due and (sampled or backward.passes):
        if backward.first is None:
            _note_conflicting_terms(registry)
        terms = backward.loss_terms
    captured = 1.0
    if scale is not None and not sampled and any(one.statistics.rows and "G" in one.sides for one in inputs.due):
        captured = scale.of_outputs()
    decaying: set[int] = set()
    for group in groups:
        for parameter in group["params"] if group["weight_decay"] else ():
            if parameter.grad is not None and (thor.decay_filter is None or thor._decays(parameter)):
                decaying.add(id(parameter))
    if scale is not None:
        scale.unscale_(gradient for _, _, gradient in with_gradient(groups))
    largest = _largest_gradient(groups, registry.index)
    if not math.isfinite(largest):
        if thor.nonfinite == "skip":
            return replace(inputs, skipped=True, counted=True)
        raise FloatingPointError(nonfinite_message(groups[0]["step"], nonfinite_names(groups, registry.index)))
    if inputs.due and registry.capture.row_mask is not None:
        check_row_mask(registry.layers.values(), registry.capture)
    output_scale = (terms if terms and thor.loss_reduction == "mean" and not sampled else 1) / captured
    return replace(
        inputs,
        terms=terms,
        output_scale=output_scale,
        largest=largest,
        decaying=frozenset(decaying),
    )


def _is_usual(thor: "THOR", group: Group) -> bool:
    """Return whether a group's options are plain numbers in range, and the others those that were checked before.

    What is not usual (a tensor, an option that was changed) is for :func:`check_group` to judge.
    """
    lr, weight_decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
    factor_decay, damping, loss_scale = group["factor_decay"], group["damping"], group["loss_scale"]
    for value in (lr, weight_decay, momentum, factor_decay, damping, loss_scale):
        if type(value) is not float and type(value) is not int:
            return False
    checked = thor._checked.get(id(group))
    if checked is None:
        return False
    for name in _OTHERS:
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
    """Return the largest Euclidean norm of a gradient; NaN or inf where one is not finite, or a step could overflow.

    One pass over the gradients and one host–device synchronisation per device: the price of the promise that NaN
    reaches no weight. A float32 norm that overflows (beyond 1e19) counts as inf, and so does one at which a natural
    gradient, at most |∇| / λ, could.

    Raises:
        RuntimeError: a gradient is neither dense nor sparse COO.
    """
    batches: dict[tuple[torch.device, bool], list[Tensor]] = {}
    damping = math.inf
    for group in groups:
        damping = min(damping, float(group["damping"]))
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout not in (torch.strided, torch.sparse_coo):
                raise RuntimeError(layout_message(index.name(parameter), gradient.layout))
            if gradient.numel():
                usual = gradient.layout is torch.strided and not gradient.is_complex()
                numbers = gradient if usual else numbers_of(gradient)
                batches.setdefault((numbers.device, numbers.dtype == torch.float64), []).append(numbers)
    largest = 0.0
    for (_, wide), batch in batches.items():
        # float16 norms would overflow at 65,504, where the gradients themselves are sound
        norms = torch._foreach_norm(batch, 2, dtype=torch.float64 if wide else torch.float32)
        norm = float(torch.stack(norms).max())
        if not math.isfinite(norm):
            return norm
        largest = max(largest, norm)
    return math.inf if largest / damping > torch.finfo(torch.float32).max else largest
