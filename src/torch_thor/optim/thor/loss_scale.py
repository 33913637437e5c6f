"""By how much a GradScaler has scaled what a step is about to use, and whether it wants the step skipped."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class LossScale:
    """What is known of a GradScaler in the step that is being taken.

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
        """Whether the scaler wants the step skipped (a synchronisation that the scaler would make otherwise)."""
        return self._found_inf is not None and float(self._found_inf) > 0

    def unscale_(self, gradients: Iterable[Tensor]) -> None:
        """Divide by the scale, where the scaler has left that to the optimizer.

        Args:
            gradients: changed in place.
        """
        if self.of_gradients is not None:
            inverse = self.of_gradients.double().reciprocal().float()
            for gradient in gradients:
                gradient.mul_(inverse.to(gradient.device))

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
    but for a keyword that it deprecates. It is on the call stack all the same, and asking it there spares everyone who
    clips gradients an argument that no other optimizer wants.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            return caller
        frame = frame.f_back
    return None
