"""What a step first reads: its options, its gradients, and what all processes must agree on.

It reads this before it changes anything.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_thor.capture.patterns import some
from torch_thor.curvature.blocks import has_values
from torch_thor.curvature.communication import Processes
from torch_thor.curvature.factor import local
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.intervals import steps_until_next
from torch_thor.optim.check import Check
from torch_thor.optim.loss_scale import LossScale
from torch_thor.optim.model_argument import Group, parameters_with_gradient
from torch_thor.optim.options import COUNTERS, OPTIONS, check, check_complete, number, scoped
from torch_thor.optim.plan import Bound, Plan


@dataclass(frozen=True)
class Request:
    """What the user of an optimizer has set for a step."""

    loss_terms: Any  # N, or a callable that returns it; None if it is to be counted
    nonfinite: str  # "raise" or "skip"
    # the loss scale, read when the processes take part in the step
    scale: Callable[[], LossScale] | None
    state_only: bool = False  # whether only the state is to be created


@dataclass(frozen=True)
class Inputs:
    """What is known about a step before it changes anything.

    The decisions are the same on all processes.
    """

    bound: Bound
    due: Sequence[LayerCurvature]  # the layers that gather statistics
    processes: Processes  # those that take their decisions together
    # for each parameter group, the step of its next refresh as of the end of this step
    next_refreshes: tuple[int, ...]
    # N, the number of loss terms of all processes together; 0 if no layer has counted any
    loss_terms: int = 0
    output_scale: float = 1.0  # makes captured output gradients those of one loss term
    # the largest norm of a gradient; 0 without gradients, or if parameters are divided
    largest: float = 0.0
    skip: bool = False
    # whether it is skipped because a gradient is not finite, so that it is counted
    nonfinite: bool = False
    check: Check | None = None  # of the gradients, on an accelerator that is not waited for
    unless: Tensor | None = None  # a number there, which that check makes 1 if nothing may change


def creates_state_only(groups: list[Group]) -> bool:
    """Return whether torch.distributed.checkpoint takes the first step to create the state.

    It does so with lr and gradients 0.
    """
    if any(number(group.get("lr")) != 0 for group in groups):  # options are not checked yet
        return False
    # those of all processes, which decide alike: one may have rows without a gradient alone
    gradients = (p.grad for group in groups for p in group["params"] if p.grad is not None)
    return not any(not has_values(g) or bool(real_elements(g).any()) for g in gradients)


class CheckedOptions:
    """The options that have passed the check, so that only those that were replaced are checked."""

    def __init__(self, optimizer: type, options: Iterable[str]) -> None:
        self._optimizer, self._options = optimizer, tuple(options)
        self._required = dict.fromkeys((*self._options, *COUNTERS))
        self._checked: dict[int, dict[str, Any]] = {}

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise ValueError for an option that is missing or out of range, as a schedule may do."""
        for i, group in enumerate(groups):
            if not group.keys() >= self._required.keys():
                check_complete(self._optimizer, i, group, self._required)
            self.check_values(group, self._options, id(group))

    def check_values(self, values: Mapping[str, Any], names: Iterable[str], key: int = 0) -> None:
        """Raise ValueError for the first value that is out of range."""
        checked = self._checked.setdefault(key, {})
        for name in names:
            value = values[name]
            # a tensor or a list may have been changed in place
            is_known = value is checked.get(name, checked) and not isinstance(value, list | Tensor)
            if not is_known:
                check(self._optimizer, {name: value})
                checked[name] = value


def next_refreshes(bound: Bound) -> tuple[int, ...]:
    """Return for each group the step of its next refresh as of the end of this step."""
    steps = []
    for group in bound.groups:
        if not (type(group["step"]) is type(group["next_refresh"]) is int):
            check(type(bound), {name: group[name] for name in COUNTERS})
        step, at, interval = (
            int(group["step"]),
            int(group["next_refresh"]),
            group["update_interval"],
        )
        if step >= at:
            at = step + (steps_until_next(interval, step) if callable(interval) else interval)
            for layer in bound.plan.layers.values():
                if layer.weight_view.options is group and not layer.stopped and not layer.due:
                    at = step + 1  # next_refresh was set back by hand: the next step has statistics
        steps.append(at)
    return tuple(steps)


def check_split(layer: LayerCurvature) -> None:
    """Raise an error for statistics that were gathered with another ``split_dim``."""
    gathered = layer.statistics.sums() if layer.statistics.rows else ()
    cuts = [factor.layout.cut for factor in layer.stored]
    if gathered and [sums.cut for sums in gathered] != cuts:
        raise RuntimeError(
            f"split_dim={layer.weight_view.options['split_dim']!r}: the statistics of layer "
            f"{layer.name!r} were gathered with another, because the option was changed between a "
            "forward pass and step(); call zero_grad() and repeat the forward and backward "
            "passes. Weights and optimizer state are as before"
        )


# what stands in groups and affects weights and factors
_COMPARED = [name for name in scoped("group", "counter") if OPTIONS[name].compared]


def facts_of_groups(inputs: Inputs) -> Iterator[str]:
    """Yield text lines on groups and layers to refresh that must be the same on all processes."""
    for i, group in enumerate(inputs.bound.groups):
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
            f"layer {layer.name!r}: {[f.layout.cut for f in layer.stored]}, {weight.dtype}, "
            f"refreshes={layer.refreshes}, gradient={weight.grad is not None}"
        )


# ---- gradients -----------------------------------------------------------------------------------


def largest_gradient(groups: Iterable[Group], plan: Plan) -> float:
    """Return the largest Euclidean norm of a gradient.

    It is NaN or inf if a gradient is not finite or the step could overflow.
    """
    batches: dict[tuple[torch.device, bool], list[Tensor]] = {}
    damping = math.inf
    for group in groups:
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
                gradient = _plain_gradient(plan, parameter, gradient)
            if gradient.numel():
                batches.setdefault((gradient.device, gradient.dtype == torch.float64), []).append(
                    gradient
                )
    largest = 0.0
    for (_, wide), batch in batches.items():
        if not has_values(batch[0]):
            continue
        # not in float16, where norms overflow at 65,504 although every gradient is finite
        norms = torch._foreach_norm(batch, 2, dtype=torch.float64 if wide else torch.float32)
        norm = float(torch.stack(norms).max())
        if not math.isfinite(norm):
            return norm
        largest = max(largest, norm)
    return math.inf if largest / damping > torch.finfo(torch.float32).max else largest


def _plain_gradient(plan: Plan, parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the elements of a gradient that this process holds, as a dense real tensor."""
    gradient = local(gradient)
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise RuntimeError(
            f"parameter {plan.name(parameter)!r} has a gradient of layout {gradient.layout}; dense "
            "and sparse COO gradients are taken: make the parameter dense, or leave it to another "
            "optimizer"
        )
    return real_elements(gradient)


def real_elements(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient as a dense real tensor."""
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def nonfinite_message(bound: Bound, parameters: Sequence[Tensor] | None = None) -> str:
    """Return the text of the error for gradients that are not finite; None: those of this step."""
    if parameters is None:
        parameters = [
            parameter
            for _, parameter, gradient in parameters_with_gradient(bound.groups)
            if has_values(gradient) and not bool(real_elements(gradient).isfinite().all())
        ]
    names = [bound.plan.name(p) for p in parameters]
    return (
        f"step {bound.groups[0]['step']}: the gradients of {some(names) or 'the model'} hold NaN, "
        "inf or numbers that would overflow; weights and optimizer state are as before this step. "
        "Lower lr or raise damping, "
        f'clip the gradients, or set optimizer.nonfinite = "skip" to skip and count such steps'
    )
