"""What a step knows before it changes anything, and how several processes come to know the same."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.parameter_view import State
from torch_thor.curvature.processes import ALONE, Processes
from torch_thor.distributed.consistency import agree, check_same_gradients
from torch_thor.distributed.process_group import LOST
from torch_thor.optim.parameters import Group, with_gradient
from torch_thor.optim.thor.clock import next_refreshes
from torch_thor.optim.thor.gradient_checks import (
    check_row_mask,
    doubtful_terms_message,
    largest_gradient,
    nonfinite_message,
    nonfinite_names,
)
from torch_thor.optim.thor.loss_scale import LossScale
from torch_thor.optim.thor.options import check_group, check_loss_terms
from torch_thor.optim.thor.parameter_index import ParameterIndex
from torch_thor.optim.thor.state import conform, is_only_asked_for

if TYPE_CHECKING:
    from torch_thor.optim.thor.optimizer import THOR

# Options that decide what becomes of weights and factors. An interval may be a function: told is what it leads to.
_OPTIONS = (
    "lr",
    "damping",
    "momentum",
    "nesterov",
    "weight_decay",
    "trace_thresholds",
    "split_dim",
    "factor_decay",
    "kl_clip",
    "max_update_ratio",
    "loss_scale",
    "scaling",
    "step",
    "next_refresh",
)
# Options that are numbers in no range; what was found right once is right while it stays.
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
        fits: whether the state is known to fit the model as it is (:func:`look`).
        waiting: whether statistics of some layer are wanted and can come.
        state_only: whether torch.distributed.checkpoint asks for the state, and nothing may move.
        terms: N, of this process; of all of them once they have agreed. 0 where no layer has counted.
        output_scale: what turns this process's output gradients into gradients of one loss term.
        refreshes: the step of each group's next refresh, as it will stand after this step.
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
    refreshes: tuple[int, ...] = ()
    skipped: bool = False
    counted: bool = False
    largest: float = 0.0
    decaying: frozenset[int] = frozenset()


def look(groups: Iterable[Group], states: Mapping[Tensor, State], index: ParameterIndex) -> list[Any]:
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
    seen = look(groups, states, index)
    fits = seen == thor._fitting
    if not fits:
        thor._fitting = None  # the views may be given what turns out not to fit
        index.update(groups, states)
    watching = capture.watching
    if watching or index.computed:
        registry.leave_out_removed(groups, states)
    due: Sequence[LayerCurvature] = ()
    if watching:
        due = [layer for layer in registry.layers.values() if capture.gathers(layer) and layer.weight.requires_grad]
    state_only = not states and is_only_asked_for(groups, states, index)
    processes: Processes = ALONE
    if not state_only and (due or thor._membership.group == LOST):
        thor._membership.announce(thor.model)
        processes = thor._processes()
    inputs = StepInputs(due, processes, fits, state_only, capture.wanting)
    try:
        inputs = _read(thor, inputs) if processes.count == 1 else _read_alike(thor, inputs)
    except FloatingPointError:
        capture.discard()
        raise
    if inputs.skipped:
        capture.discard()
        thor.skipped_steps += inputs.counted
    return inputs


def _read_alike(thor: "THOR", inputs: StepInputs) -> StepInputs:
    """Read, and have all processes raise what one of them found wrong, skip what one skips, and know all loss terms."""
    read, error, facts = inputs, None, []
    try:
        read = _read(thor, inputs)
        facts = list(_facts(thor, read))
    except Exception as problem:  # it is raised on every process
        error = problem
    rows = agree(inputs.processes, error, facts, [read.terms, read.skipped, read.counted, read.largest])
    terms, skipped, counted, largest = zip(*rows, strict=True)
    if any(skipped):
        return replace(read, skipped=True, counted=any(counted))
    check_same_gradients(largest)
    return replace(read, terms=int(sum(terms)))


def _read(thor: "THOR", inputs: StepInputs) -> StepInputs:
    """Look at what this process has for the step, and raise what is wrong with it."""
    groups, registry = thor.param_groups, thor._registry
    for group in groups:
        if not _is_usual(thor, group):  # again: a schedule may have run damping down to 0
            check_group(group)
            thor._checked[id(group)] = {name: group[name] for name in _OTHERS}
    if not inputs.fits:
        conform(groups, thor.state, registry.layers.values(), registry.index)
    refreshes = tuple(next_refreshes(groups))
    # a GradScaler says by this attribute that it wants to be asked
    scale = None if thor.grad_scaler is None and not hasattr(thor, "found_inf") else LossScale(thor, thor.grad_scaler)
    if scale is not None and scale.found_inf:
        return replace(inputs, refreshes=refreshes, skipped=True)
    terms = _loss_terms(thor) if inputs.due or thor.loss_terms is not None else 0
    sampled = registry.capture.sampler is not None  # gradients of single terms as they are
    captured = 1.0
    if scale is not None and not sampled and any(one.rows and "G" in one.sides for one in inputs.due):
        captured = scale.of_outputs()
    decaying: set[int] = set()
    for group in groups:
        if group["weight_decay"]:
            decaying.update(id(p) for p in group["params"] if p.grad is not None and thor._decays(p))
    if scale is not None:
        scale.unscale_(gradient for _, _, gradient in with_gradient(groups))
    largest = largest_gradient(groups, registry.index)
    if not math.isfinite(largest):
        if thor.nonfinite == "skip":
            return replace(inputs, refreshes=refreshes, skipped=True, counted=True)
        raise FloatingPointError(nonfinite_message(groups[0]["step"], nonfinite_names(groups, registry.index)))
    if inputs.due:
        check_row_mask(registry.layers.values(), registry.capture)
    output_scale = (terms if thor.loss_reduction == "mean" and not sampled else 1) / captured
    return replace(
        inputs,
        refreshes=refreshes,
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


def _loss_terms(thor: "THOR") -> int:
    given = thor.loss_terms() if callable(thor.loss_terms) else thor.loss_terms
    if given is not None:
        return check_loss_terms(given)
    registry = thor._registry
    if registry.capture.doubtful_terms:
        message = doubtful_terms_message(*registry.capture.doubtful_terms)
        registry.warnings.note(message, message)
    return registry.capture.loss_terms


def _facts(thor: "THOR", inputs: StepInputs) -> Iterator[str]:
    """Yield what must be the same on all processes."""
    yield f"loss_reduction={thor.loss_reduction!r}"
    yield f"fisher={thor.fisher!r}"
    sampler = thor._registry.capture.sampler
    if sampler is not None:
        yield f"sampled labels: {'yes' if sampler.passes else 'no'}"
    for i, group in enumerate(thor.param_groups):
        for name in _OPTIONS:
            value = group[name]
            yield f"parameter group {i}: {name}={float(value) if hasattr(value, 'item') else value!r}"
        # where intervals differ, one rank would wait in a refresh that the others do not take: known one refresh before
        yield f"parameter group {i}: update_interval makes step {inputs.refreshes[i]} the next refresh"
    for layer in inputs.due:
        weight = layer.weight
        yield (
            f"layer {layer.name!r}: factors {layer.layouts()}, {weight.dtype}, refreshes={layer.refreshes}, "
            f"gradient={weight.grad is not None}"
        )
