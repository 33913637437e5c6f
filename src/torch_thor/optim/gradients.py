"""Gradients of zeros, which only create the state, and the check for gradients not finite."""

import math
from typing import Any

import torch
from torch import Tensor

from torch_thor.capture.patterns import some
from torch_thor.curvature.view import local
from torch_thor.optim.model_argument import Group


def real_elements(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient that this process holds, as a dense real tensor."""
    gradient = local(gradient)
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def creates_state_only(groups: list[Group]) -> bool:
    """Return whether torch.distributed.checkpoint takes the first step to create the state.

    It does so with lr and gradients 0.
    """
    if any(float(group["lr"]) != 0 for group in groups):
        return False
    gradients = (p.grad for group in groups for p in group["params"] if p.grad is not None)
    return not any(bool(real_elements(g).any()) for g in gradients)


def check_gradients(optimizer: torch.optim.Optimizer) -> Any:
    """Look at the gradients before each step of an optimizer, and refuse NaN and inf.

    A step looks at none, as those of torch's optimizers. With this the host waits for the device in
    every step, once.

    Args:
        optimizer: any optimizer.

    Returns:
        A handle; ``handle.remove()`` ends it.

    Raises:
        FloatingPointError: in a step; it names the parameters, and nothing has changed.
    """

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = getattr(optimizer, "model", None)
        named = {} if model is None else {p: name for name, p in model.named_parameters()}
        gradients = {
            named.get(p, f"parameter {k} of group {i}"): real_elements(p.grad)
            for i, group in enumerate(optimizer.param_groups)
            for k, p in enumerate(group["params"])
            if p.grad is not None
        }
        found = {name: values for name, values in gradients.items() if values.numel()}
        largest = torch._foreach_norm(list(found.values()), math.inf) if found else []
        flags = [each.isfinite().to(largest[0].device) for each in largest]
        finite = torch.stack(flags).tolist() if flags else []
        bad = [name for name, is_finite in zip(found, finite, strict=True) if not is_finite]
        if bad:
            raise FloatingPointError(
                f"the gradients of {some(bad)} hold NaN or inf; weights and state are as before. "
                "Lower lr or raise damping, clip the gradients, or skip the step"
            )

    return optimizer.register_step_pre_hook(check)
