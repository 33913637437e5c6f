"""What a step reads and checks before it changes anything, and all processes' agreement on it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from torch_thor.capture.gathering import loss_terms_of_step
from torch_thor.capture.patterns import some
from torch_thor.curvature.factor import local
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import ALONE, Processes
from torch_thor.distributed.agreement import agree, check_same_gradients
from torch_thor.intervals import steps_until_next
from torch_thor.optim import report
from torch_thor.optim.checkpoint import conform
from torch_thor.optim.loss_scale import LossScale
from torch_thor.optim.options import OPTIONS, check
from torch_thor.optim.parameters import parameters_with_gradient
from torch_thor.optim.plan import Plan

if TYPE_CHECKING:
    from torch_thor.optim.base import CurvatureOptimizer


@dataclass(frozen=True)
class Inputs:
    """What is known about a step before it changes anything.

    The decisions are the same on all processes.
    """

    due: Sequence[LayerCurvature]  # the layers that gather statistics
    processes: Processes  # those that take their decisions together
    # for each parameter group, the step of its next refresh as of the end of this step
    next_refreshes: tuple[int, ...]
    # N, the number of loss terms of all processes together; 0 if no layer has counted any
    terms: int = 0
    output_scale: float = 1.0  # makes captured output gradients those of one loss term
    # the largest norm of a gradient; 0 without gradients, or if parameters are divided
    largest: float = 0.0
    skip: bool = False
    # whether it is skipped because a gradient is not finite, so that it is counted
    nonfinite: bool = False


def creates_state_only(optimizer: "CurvatureOptimizer") -> bool:
    """Return whether torch.distributed.checkpoint takes the first step to create the state.

    It does so with lr and gradients 0.
    """
    if any(float(group["lr"]) for group in optimizer.param_groups):
        return False
    gradients = parameters_with_gradient(optimizer.param_groups)
    return not any(bool(_real_elements(gradient).any()) for _, _, gradient in gradients)


def read_inputs(optimizer: "CurvatureOptimizer", state_only: bool) -> Inputs:
    """Read and check the inputs of a step, and agree on them with the other processes."""
    capture = optimizer._capture
    # Processes agree on refreshes; and on every step if the update sends something, because one
    # that raises or skips leaves the others waiting, or if a step may be skipped, because that
    # process would refresh later than the others.
    options, sends = optimizer._distributed, optimizer._distributed.divide_curvature
    if optimizer._plan.first_shards is not None:
        sends = (
            sends or options.whole_matrices or any(g.get("kl_clip") for g in optimizer.param_groups)
        )
    processes: Processes = ALONE
    if (capture.awaited or sends or optimizer.nonfinite == "skip") and not state_only:
        processes = (
            options.processes(optimizer._plan)
            if dist.is_available() and dist.is_initialized()
            else ALONE
        )
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


# Options that affect weights and factors. update_interval may be a function, so its results are
# compared instead.
_COMPARED = (
    *(
        "lr",
        "damping",
        "momentum",
        "nesterov",
        "weight_decay",
        "trace_thresholds",
        "split_dim",
        "factor_decay",
    ),
    *("kl_clip", "max_update_ratio", "step", "next_refresh"),
)


def _facts(optimizer: "CurvatureOptimizer", inputs: Inputs) -> Iterator[str]:
    """Yield lines of text that must be the same on all processes."""
    distributed, sampler = optimizer._distributed, optimizer._capture.sampler
    yield f"loss_reduction={optimizer.loss_reduction!r}, fisher={optimizer.fisher!r}"
    # with 'skip' ranks agree on every step, not on refreshes alone
    yield f"nonfinite={optimizer.nonfinite!r}"
    yield (
        f"divide_curvature={distributed.divide_curvature}, "
        f"whole_matrices={distributed.whole_matrices}"
    )
    yield f"communication_dtype={distributed.communication_dtype}"
    if sampler is not None:
        yield f"sampled labels: {'yes' if sampler.passes else 'no'}"
    for i, group in enumerate(optimizer.param_groups):
        for name in _COMPARED:
            value = group.get(name)
            yield (
                f"parameter group {i}: "
                f"{name}={float(value) if isinstance(value, Tensor) else value!r}"
            )
        # compared one refresh ahead: with other intervals one rank would wait in a refresh that the
        # others do not take
        yield (
            f"parameter group {i}: update_interval makes step {inputs.next_refreshes[i]} the next "
            "refresh"
        )
    for layer in inputs.due:
        weight = layer.weight
        yield (
            f"layer {layer.name!r}: {[f.cut for f in layer.stored]}, {weight.dtype}, "
            f"refreshes={layer.refreshes}, gradient={weight.grad is not None}"
        )


def _read(optimizer: "CurvatureOptimizer", processes: Processes) -> Inputs:
    """Return the inputs of this process."""
    # Raise an error for an option, a state or a gradient that cannot be used.
    groups, capture = optimizer.param_groups, optimizer._capture
    _check_options(optimizer)  # in every step: a schedule may have changed damping to 0
    # looking for removed modules takes time
    plan, due, upcoming = plan_now(optimizer, modules=bool(capture.awaited)), [], []
    for layer in plan.layers.values() if capture.awaited else ():
        if layer not in capture.gathering or not layer.weight.requires_grad:
            continue  # one that was made just now gathers nothing yet
        due.append(layer)
        gathered = layer.statistics.sums() if layer.statistics.rows else ()
        if any(
            sums.cut != factor.cut for sums, factor in zip(gathered, layer.stored, strict=False)
        ):
            raise RuntimeError(
                f"split_dim={layer.weight_view.options['split_dim']!r}: the statistics of layer "
                f"{layer.name!r} were gathered with another, because the option was changed "
                "between a forward pass and step(); call zero_grad() and repeat the forward and "
                "backward passes. Weights and optimizer state are as before"
            )
    for group in groups:
        step, at, interval = (
            int(group["step"]),
            int(group["next_refresh"]),
            group["update_interval"],
        )
        if step >= at:
            at = step + (steps_until_next(interval, step) if callable(interval) else interval)
            for layer in plan.layers.values():
                if layer.weight_view.options is group and not layer.stopped and not layer.due:
                    at = step + 1  # next_refresh was set back by hand: the next step has statistics
        upcoming.append(at)
    known = due, processes, tuple(upcoming)
    # GradScaler sets this attribute before it calls step()
    scale = None
    if optimizer.grad_scaler is not None or hasattr(optimizer, "found_inf"):
        scale = LossScale(optimizer)
        if scale.found_inf:
            return Inputs(*known, skip=True)
    # then captured gradients are those of single loss terms already
    sampled = capture.sampler is not None
    given, terms = optimizer.loss_terms, 0
    given = given() if callable(given) else given
    if given is not None:
        check(type(optimizer), {"loss_terms": given})
        terms = int(given)
    elif due and "G" in optimizer.sides:
        if capture.sampler is not None:
            terms = capture.sampler.terms
        else:
            terms, uncertain = loss_terms_of_step(capture.passes.values())
            if uncertain is not None:
                optimizer._warnings.note("loss terms", _UNCERTAIN.format(*uncertain))
    captured = 1.0
    if (
        scale is not None
        and not sampled
        and any(layer.statistics.rows and "G" in layer.sides for layer in due)
    ):
        captured = scale.of_outputs()
    if scale is not None:
        scale.unscale_(gradient for _, _, gradient in parameters_with_gradient(groups))
    largest = _largest_gradient(optimizer)
    if not math.isfinite(largest):
        if optimizer.nonfinite == "skip":
            return Inputs(*known, skip=True, nonfinite=True)
        raise FloatingPointError(_nonfinite_message(optimizer))
    mask = capture.row_mask
    if (
        due
        and mask is not None
        and not capture.mask_taken
        and any(layer.statistics.rows for layer in due)
    ):
        capture.discard()
        raise RuntimeError(
            f"row_mask of shape {tuple(mask.shape)} fits no layer: it must have the leading "
            "dimensions of the layers' inputs, (N, L); set it before each forward pass, and to "
            "None where there is no padding"
        )
    output_scale = (
        terms if terms and optimizer.loss_reduction == "mean" and not sampled else 1
    ) / captured
    if plan.first_shards is not None:
        largest = 0.0  # every process has other rows, whose gradients differ
    return Inputs(*known, terms, output_scale, largest)


_UNCERTAIN = (
    "THOR takes N = {0} for the number of loss terms of a backward pass, from the leading "
    "dimension of the layers' inputs, while the last layer's input has {1}. If the loss averages "
    "over another number (predicted tokens, groups of rows), set optimizer.loss_terms; {0} "
    "confirms this one"
)


def _check_options(optimizer: "CurvatureOptimizer") -> None:
    """Check the options of all groups that were replaced since they were last checked."""
    for group in (*optimizer.param_groups, {"nonfinite": optimizer.nonfinite}):
        checked = optimizer._checked.setdefault(id(group) if "params" in group else 0, {})
        for name, value in group.items():
            # a tensor or a list may have been changed in place
            if name in OPTIONS and (
                value is not checked.get(name, checked) or isinstance(value, list | Tensor)
            ):
                check(type(optimizer), {name: value})
                checked[name] = value


def _largest_gradient(optimizer: "CurvatureOptimizer") -> float:
    """Return the largest Euclidean norm of a gradient."""
    # It is NaN or inf if a gradient is not finite or the step could overflow.
    batches: dict[tuple[torch.device, bool], list[Tensor]] = {}
    damping = math.inf
    for group in optimizer.param_groups:
        damping = min(damping, float(group["damping"]))
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if (
                type(gradient) is not Tensor
                or gradient.layout is not torch.strided
                or gradient.is_complex()
            ):
                gradient = _plain_gradient(optimizer, parameter, gradient)
            if gradient.numel():
                batches.setdefault((gradient.device, gradient.dtype == torch.float64), []).append(
                    gradient
                )
    largest = 0.0
    for (_, wide), batch in batches.items():
        # not in float16, where norms overflow at 65,504 although every gradient is finite
        norms = torch._foreach_norm(batch, 2, dtype=torch.float64 if wide else torch.float32)
        norm = float(torch.stack(norms).max())
        if not math.isfinite(norm):
            return norm
        largest = max(largest, norm)
    return math.inf if largest / damping > torch.finfo(torch.float32).max else largest


def _plain_gradient(optimizer: "CurvatureOptimizer", parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the elements of a gradient that this process holds, as a dense real tensor."""
    gradient = local(gradient)
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise RuntimeError(
            f"parameter {optimizer._plan.name(parameter)!r} has a gradient of layout "
            f"{gradient.layout}; dense and sparse COO gradients are taken: make the parameter "
            "dense, or leave it to another optimizer"
        )
    return _real_elements(gradient)


def _real_elements(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient as a dense real tensor."""
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def _nonfinite_message(optimizer: "CurvatureOptimizer") -> str:
    gradients = parameters_with_gradient(optimizer.param_groups)
    names = [
        optimizer._plan.name(p)
        for _, p, g in gradients
        if not bool(_real_elements(g).isfinite().all())
    ]
    return (
        f"step {optimizer.param_groups[0]['step']}: the gradients of {some(names) or 'the model'} "
        "hold NaN, inf or numbers that would overflow; weights and optimizer state are as before "
        "this step. Lower lr or raise damping, "
        f'clip the gradients, or set optimizer.nonfinite = "skip" to skip and count such steps'
    )


# ---- the plan ------------------------------------------------------------------------------------


def plan_now(optimizer: "CurvatureOptimizer", *, modules: bool = True) -> Plan:
    """Return the plan, the same object unless something that it describes was replaced.

    Modules are included in what it describes.
    """
    plan = optimizer._plan
    # a module that owns a parameter may have been removed, which the fingerprint cannot see
    lost = modules and not {id(m) for _, m, _ in plan.attributes} <= {
        id(m) for m in plan.model.modules()
    }
    return (
        renew(optimizer, plan) if lost or plan.fingerprint != fingerprint(optimizer, plan) else plan
    )


def fingerprint(optimizer: "CurvatureOptimizer", plan: Plan) -> list[Any]:
    """Return everything on which a plan depends.

    A plan is made anew if this differs from its own.
    """
    found: list[Any] = [len(optimizer.state)]
    # FSDP2 replaces the parameters of modules while they run, and those of groups stay
    if not plan.sharded:
        for _, module, attribute in plan.attributes:
            found.append(id(module._parameters.get(attribute)))
    for group in optimizer.param_groups:
        found.append((id(group), group["split_dim"], len(group["params"])))
        for p in group["params"]:
            shape = None if isinstance(p, nn.UninitializedParameter) else p.shape
            found.append(
                (id(p), p.requires_grad, shape, p.dtype, p.device, id(optimizer.state.get(p)))
            )
    return found


def renew(optimizer: "CurvatureOptimizer", before: Plan | None = None) -> Plan:
    """Make the plan anew; if an error is raised, weights and optimizer state are as before."""
    groups, states = optimizer.param_groups, optimizer.state
    if before is not None:
        # its layers are bound anew here, so even if this fails they are bound again
        before.fingerprint = []
    plan = Plan(optimizer.model, groups, states, optimizer.sides, optimizer.layers, before)
    plan.fingerprint = fingerprint(optimizer, plan)
    if before is not None:
        if not plan.layers and "G" in optimizer.sides:
            raise ValueError(report.nothing_found(optimizer, plan, plan.entries))
        conform(plan, groups, states)
        report.note_changes(optimizer, before, plan)
    optimizer._plan, optimizer._complete, optimizer._renewed = plan, False, True
    optimizer._capture.follow(optimizer.model, plan.hooks)
    return plan
