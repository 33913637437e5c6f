"""What a step reads and checks before it changes anything, and the agreement of all processes on it."""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from torch_thor.capture.patterns import some
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import ALONE, Processes
from torch_thor.distributed.agreement import agree, check_same_gradients
from torch_thor.intervals import steps_until_next
from torch_thor.optim.options import check
from torch_thor.optim.parameters import parameters_with_gradient
from torch_thor.optim.statistics_checks import check_blocks, check_row_mask, conflicting_terms_message

if TYPE_CHECKING:
    from torch_thor.optim.base import CurvatureOptimizer


@dataclass(frozen=True)
class Inputs:
    """What is known about a step before it changes anything; the decisions are the same on all processes."""

    due: Sequence[LayerCurvature]  # the layers that gather statistics
    processes: Processes  # those that take their decisions together
    next_refreshes: tuple[int, ...]  # for each parameter group, the step of its next refresh as of the end of this step
    terms: int = 0  # N, the number of loss terms of all processes together; 0 if no layer has counted any
    output_scale: float = 1.0  # makes captured output gradients those of one loss term
    largest: float = 0.0  # the largest norm of a gradient; 0 without gradients, or if parameters are divided
    skip: bool = False
    nonfinite: bool = False  # whether it is skipped because a gradient is not finite, so that it is counted


def creates_state_only(optimizer: "CurvatureOptimizer") -> bool:
    """Return whether torch.distributed.checkpoint takes the first step to create the state, with lr and gradients 0."""
    if optimizer.state or any(float(group["lr"]) for group in optimizer.param_groups):
        return False
    gradients = parameters_with_gradient(optimizer.param_groups)
    return not any(bool(_real_elements(gradient).any()) for _, _, gradient in gradients)


def read_inputs(optimizer: "CurvatureOptimizer", state_only: bool) -> Inputs:
    """Read and check the inputs of a step, and agree on them with the other processes."""
    capture = optimizer._capture
    # Processes agree on refreshes; and on every step if the update sends something, because one that raises or skips
    # leaves the others waiting, or if a step may be skipped, because that process would refresh later than the others.
    divided = optimizer._plan.first_shards is not None
    sends = optimizer.distributed.divide_curvature or (
        divided and (optimizer.distributed.whole_matrices or any(g.get("kl_clip") for g in optimizer.param_groups))
    )
    together = (capture.watching or sends or optimizer.nonfinite == "skip") and not state_only
    processes: Processes = ALONE
    if together and dist.is_available() and dist.is_initialized():
        processes = optimizer.distributed.processes(optimizer._plan.device)
    if processes.count == 1:
        return _read(optimizer, processes)
    own, error, facts, numbers = None, None, [], [0.0] * 4
    try:
        own = _read(optimizer, processes)
        facts = list(_facts(optimizer, own))
        numbers = [own.terms, own.skip, own.nonfinite, own.largest]
    except Exception as problem:  # it is raised on every process
        error = problem
    terms, skip, nonfinite, largest = zip(*agree(processes, error, facts, numbers), strict=True)
    assert own is not None  # agree() raises the error of this process
    if any(skip):
        return replace(own, skip=True, nonfinite=any(nonfinite))
    check_same_gradients(largest)
    return replace(own, terms=int(sum(terms)))


# Options that affect weights and factors. update_interval may be a function, so its results are compared instead.
_COMPARED = (
    *("lr", "damping", "momentum", "nesterov", "weight_decay", "trace_thresholds", "split_dim", "factor_decay"),
    *("kl_clip", "max_update_ratio", "step", "next_refresh"),
)


def _facts(optimizer: "CurvatureOptimizer", inputs: Inputs) -> Iterator[str]:
    """Yield lines of text that must be the same on all processes."""
    distributed, sampler = optimizer.distributed, optimizer._capture.sampler
    yield f"loss_reduction={optimizer.loss_reduction!r}, fisher={optimizer.fisher!r}"
    yield f"nonfinite={optimizer.nonfinite!r}"  # with 'skip' ranks agree on every step, not on refreshes alone
    yield f"divide_curvature={distributed.divide_curvature}, whole_matrices={distributed.whole_matrices}"
    yield f"communication_dtype={distributed.communication_dtype}"
    if sampler is not None:
        yield f"sampled labels: {'yes' if sampler.passes else 'no'}"
    for i, group in enumerate(optimizer.param_groups):
        for name in _COMPARED:
            value = group.get(name)
            yield f"parameter group {i}: {name}={float(value) if isinstance(value, Tensor) else value!r}"
        # compared one refresh ahead: with other intervals one rank would wait in a refresh that the others do not take
        yield f"parameter group {i}: update_interval makes step {inputs.next_refreshes[i]} the next refresh"
    for layer in inputs.due:
        weight = layer.weight
        yield (
            f"layer {layer.name!r}: {[f.cut for f in layer.stored]}, {weight.dtype}, refreshes={layer.refreshes}, "
            f"gradient={weight.grad is not None}"
        )


def _read(optimizer: "CurvatureOptimizer", processes: Processes) -> Inputs:
    """Return the inputs of this process; raise an error for an option, a state or a gradient that cannot be used."""
    groups, capture = optimizer.param_groups, optimizer._capture
    optimizer._check_groups()  # in every step: a schedule may have changed damping to 0
    plan = optimizer._plan_now()
    # a layer that was made just now has no statistics of this step
    gathering = capture.gathering if capture.watching else ()
    due = [layer for layer in plan.layers.values() if layer in gathering and layer.weight.requires_grad]
    check_blocks(due)
    known = due, processes, tuple(_next_refresh(optimizer, group) for group in groups)
    # GradScaler sets this attribute before it calls step()
    scale = None
    if optimizer.grad_scaler is not None or hasattr(optimizer, "found_inf"):
        scale = LossScale(optimizer)
        if scale.found_inf:
            return Inputs(*known, skip=True)
    sampled = capture.sampler is not None  # then captured gradients are those of single loss terms already
    given, terms = optimizer.loss_terms, 0
    given = given() if callable(given) else given
    if given is not None:
        check(type(optimizer), {"loss_terms": given})
        terms = int(given)
    elif due and "G" in optimizer.sides:
        terms, conflict = capture.backward.loss_terms, capture.backward.conflicting_loss_terms
        if conflict is not None and not sampled:
            optimizer._warnings.note("loss terms", conflicting_terms_message(*conflict))
    captured = 1.0
    if scale is not None and not sampled and any(layer.statistics.rows and "G" in layer.sides for layer in due):
        captured = scale.of_outputs()
    if scale is not None:
        scale.unscale_(gradient for _, _, gradient in parameters_with_gradient(groups))
    largest = _largest_gradient(optimizer)
    if not math.isfinite(largest):
        if optimizer.nonfinite == "skip":
            return Inputs(*known, skip=True, nonfinite=True)
        raise FloatingPointError(_nonfinite_message(optimizer))
    if due and capture.row_mask is not None:
        check_row_mask(plan.layers.values(), capture)
    output_scale = (terms if terms and optimizer.loss_reduction == "mean" and not sampled else 1) / captured
    if plan.first_shards is not None:
        largest = 0.0  # every process has other rows, whose gradients differ
    return Inputs(*known, terms, output_scale, largest)


def _next_refresh(optimizer: "CurvatureOptimizer", group: dict[str, Any]) -> int:
    """Return the step of a group's next refresh as of the end of this step."""
    step, at, interval = int(group["step"]), int(group["next_refresh"]), group["update_interval"]
    if step < at:
        return at
    for layer in optimizer._plan.layers.values():
        if layer.weight_view.options is group and not layer.stopped and not layer.due:
            return step + 1  # next_refresh was set back by hand: the next step has statistics
    return step + (steps_until_next(interval, step) if callable(interval) else interval)


def _largest_gradient(optimizer: "CurvatureOptimizer") -> float:
    """Return the largest Euclidean norm of a gradient; NaN or inf if one is not finite or the step could overflow."""
    batches: dict[tuple[torch.device, bool], list[Tensor]] = {}
    damping = min(float(group["damping"]) for group in optimizer.param_groups)
    for _, parameter, gradient in parameters_with_gradient(optimizer.param_groups):
        if gradient.layout not in (torch.strided, torch.sparse_coo):
            raise RuntimeError(
                f"parameter {optimizer._plan.name(parameter)!r} has a gradient of layout {gradient.layout}; dense and "
                f"sparse COO gradients are taken: make the parameter dense, or leave it to another optimizer"
            )
        if gradient.numel():
            numbers = _real_elements(gradient)
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


def _real_elements(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient as a dense real tensor."""
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def _nonfinite_message(optimizer: "CurvatureOptimizer") -> str:
    gradients = parameters_with_gradient(optimizer.param_groups)
    names = [optimizer._plan.name(p) for _, p, g in gradients if not bool(_real_elements(g).isfinite().all())]
    return (
        f"step {optimizer.param_groups[0]['step']}: the gradients of {some(names) or 'the model'} hold NaN, inf or "
        f"numbers that would overflow; weights and optimizer state are as before this step. Lower lr or raise damping, "
        f'clip the gradients, or set optimizer.nonfinite = "skip" to skip and count such steps'
    )


class LossScale:
    """The loss scale of a GradScaler: by how much it has scaled gradients, and whether the step must be skipped."""

    # GradScaler does not unscale gradients or skip steps for an optimizer that sets `_step_supports_amp_scaling`.
    # Instead it sets two tensors as attributes of the optimizer, `grad_scale` and `found_inf`. From a plain
    # `scaler.step(optimizer)` the scale of the captured output gradients cannot be learnt in any other way. If the user
    # has called `scaler.unscale_`, it sets no scale, and the scaler itself is asked.

    def __init__(self, optimizer: Any) -> None:
        self._scaler = optimizer.grad_scaler
        self._in_use = hasattr(optimizer, "found_inf")
        found = getattr(optimizer, "found_inf", None)
        self.found_inf = found is not None and float(found) > 0  # a synchronisation that the scaler would make itself
        self._of_gradients: Tensor | None = getattr(optimizer, "grad_scale", None)

    def unscale_(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, if the scaler has left that to the optimizer."""
        if self._of_gradients is not None:
            inverse = self._of_gradients.double().reciprocal().float()
            for gradient in gradients:
                gradient.mul_(inverse.to(gradient.device))

    def of_outputs(self) -> float:
        """Return the scale of the captured output gradients."""
        if self._scaler is not None:
            return float(self._scaler.get_scale())
        if self._of_gradients is not None:
            return float(self._of_gradients)
        if not self._in_use:
            return 1.0
        frame = inspect.currentframe()
        while frame is not None:  # the GradScaler that is calling step()
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler):
                return float(caller.get_scale())
            frame = frame.f_back
        raise RuntimeError(
            "gradients were unscaled before step(), by a scaler that cannot be asked for the scale of the statistics "
            "that were captured; set optimizer.grad_scaler = scaler"
        )


def remove_scale(optimizer: Any) -> None:
    """Remove what GradScaler has set on the optimizer, so that the next step does not divide by it."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
