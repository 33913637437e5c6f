"""Finds gradients with which no step can be taken, and describes them in errors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.optim.parameter_index import ParameterIndex
from torch_thor.optim.parameters import Group, parameters_with_gradient


def real_elements(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient as a dense real tensor."""
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def nonfinite_names(groups: list[Group], index: ParameterIndex) -> list[str]:
    """Return the names of the parameters whose gradients hold NaN or inf."""
    return [
        index.name(p) for _, p, g in parameters_with_gradient(groups) if not bool(real_elements(g).isfinite().all())
    ]


def layout_message(name: str, layout: torch.layout) -> str:
    """Return the text of the error for a gradient that is neither dense nor sparse COO."""
    return (
        f"parameter {name!r} has a gradient of layout {layout}; THOR takes dense and sparse COO gradients: make the "
        f"parameter dense, or leave it to another optimizer: THOR([p for p in ...], model=model)"
    )


def nonfinite_message(step: int, names: Sequence[str]) -> str:
    """Return the text of the error for a step whose gradients are not finite."""
    return (
        f"step {step}: the gradients of {some(names) or 'the model'} hold NaN, inf or numbers that would overflow; "
        f"weights and optimizer state are as before this step. Lower lr or raise damping, clip the gradients, or pass "
        f'nonfinite="skip" to skip and count such steps'
    )


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first few names of a list as text."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
