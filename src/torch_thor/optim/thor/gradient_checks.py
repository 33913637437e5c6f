"""What is wrong with gradients that a step cannot be taken with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.optim.parameters import Group, with_gradient
from torch_thor.optim.thor.parameter_index import ParameterIndex


def numbers_of(gradient: Tensor) -> Tensor:
    """Return the real numbers that a gradient holds, whatever its layout.

    Args:
        gradient: dense or sparse (COO), real or complex.

    Returns:
        A dense real tensor, for looking at.
    """
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def nonfinite_names(groups: list[Group], index: ParameterIndex) -> list[str]:
    """Return the parameters whose gradients hold NaN or inf.

    Args:
        groups: parameter groups.
        index: knows the parameters' names.

    Returns:
        Their names.
    """
    return [index.name(p) for _, p, g in with_gradient(groups) if not bool(numbers_of(g).isfinite().all())]


def layout_message(name: str, layout: torch.layout) -> str:
    """Return the text of the error for a gradient that is neither dense nor sparse COO.

    Args:
        name: the parameter.
        layout: the layout of its gradient.

    Returns:
        The message.
    """
    return f"parameter {name!r} has a gradient of layout {layout}; THOR takes dense and sparse COO gradients"


def nonfinite_message(step: int, names: Sequence[str]) -> str:
    """Return the text of the error for a step that is refused.

    Args:
        step: its number.
        names: the parameters whose gradients are not finite; none where only their norms overflow.

    Returns:
        The message.
    """
    return (
        f"step {step}: the gradients of {some(names) or 'the model'} hold NaN, inf or numbers that would overflow; "
        f"weights and optimizer state are as before this step. Lower lr or raise damping, clip the gradients, or pass "
        f'nonfinite="skip" to skip and count such steps'
    )


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first few names as text.

    Args:
        names: all of them.
        most: how many to spell out.

    Returns:
        ``"a, b and 3 more"``.
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
