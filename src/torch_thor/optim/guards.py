"""What a step asks of its gradients before it touches anything: are they finite, dense, and scaled by how much?"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def numbers_of(gradient: Tensor) -> Tensor:
    """Return the real numbers that a gradient holds, whatever its layout.

    Args:
        gradient: dense or sparse (COO), real or complex.

    Returns:
        A dense real tensor, for looking at.
    """
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def largest_norm(gradients: Sequence[Tensor]) -> float:
    """Return the largest Euclidean norm among the gradients, NaN or inf if one holds a number that is not finite.

    One pass over the gradients and one wait for each device: the price of the promise that NaN reaches no weight.

    Args:
        gradients: dense tensors.

    Returns:
        The norm, 0 for no gradients. A float32 norm that overflows (beyond 1e19) counts as inf.
    """
    batches: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for gradient in gradients:
        batches.setdefault((gradient.device, gradient.dtype == torch.float64), []).append(gradient)
    largest = 0.0
    for (_, wide), batch in batches.items():
        # float16 norms would overflow at 65,504, where the gradients themselves are sound
        norms = torch._foreach_norm(batch, 2, dtype=torch.float64 if wide else torch.float32)
        value = float(torch.stack(norms).max())
        if not math.isfinite(value):
            return value
        largest = max(largest, value)
    return largest


def nonfinite_message(step: int, names: Sequence[str]) -> str:
    """Return the text of the error for a step that is refused.

    Args:
        step: its number.
        names: the parameters at fault, if single ones are.

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


class LossScale:
    """What a GradScaler has told of the step that is being taken.

    GradScaler hands an optimizer that sets ``_step_supports_amp_scaling`` two tensors as attributes, ``grad_scale`` and
    ``found_inf``, in the place of unscaling and skipping itself: the only way to learn the scale of the captured output
    gradients from a plain ``scaler.step(optimizer)``. Where the user has called ``scaler.unscale_`` it hands over no
    scale, and the scaler itself is asked.

    Args:
        optimizer: where GradScaler puts its attributes.
        grad_scaler: the scaler, if the user gave it.
    """

    def __init__(self, optimizer: Any, grad_scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = grad_scaler
        self._in_use = hasattr(optimizer, "found_inf")
        self._found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self.of_gradients: Tensor | None = getattr(optimizer, "grad_scale", None)

    @property
    def found_inf(self) -> bool:
        """Whether the scaler wants the step skipped (a wait for the device, which the scaler would do otherwise)."""
        return self._found_inf is not None and float(self._found_inf) > 0

    def of_outputs(self) -> float:
        """Return by how much the captured output gradients are scaled.

        Returns:
            The scale, 1 without a scaler.

        Raises:
            RuntimeError: the gradients were unscaled beforehand, by something that is not torch's GradScaler.
        """
        if self._scaler is not None:
            return float(self._scaler.get_scale())
        if self.of_gradients is not None:
            return float(self.of_gradients)
        if self._in_use:
            scaler = _calling_scaler()
            if scaler is not None:
                return float(scaler.get_scale())
            raise RuntimeError(
                "gradients were unscaled before step(), by a scaler that THOR cannot ask for the scale of the "
                "statistics that it captured; make it with THOR(..., grad_scaler=scaler), or set optimizer.grad_scaler"
            )
        return 1.0


def _calling_scaler() -> torch.amp.GradScaler | None:
    """Return the GradScaler in whose ``step`` we are.

    After ``scaler.unscale_(optimizer)`` GradScaler hands over its verdict and no scale (torch 2.9 to 2.15), nor itself,
    but for a keyword that it deprecates. It is on the call stack all the same, and asking it there spares everybody who
    clips gradients an argument that no other optimizer wants.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            return caller
        frame = frame.f_back
    return None
