"""A GradScaler's loss scale: its factor on gradients, and whether the step must be skipped."""

import inspect
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class LossScale:
    """A GradScaler's loss scale: its factor on gradients, and whether the step must be skipped."""

    # GradScaler does not unscale gradients or skip steps for an optimizer that sets
    # `_step_supports_amp_scaling`. Instead it sets two tensors as attributes of the optimizer,
    # `grad_scale` and `found_inf`. From a plain `scaler.step(optimizer)` the scale of the captured
    # output gradients cannot be learnt in any other way. If the user has called `scaler.unscale_`,
    # it sets no scale, and the scaler itself is asked.

    def __init__(self, optimizer: Any) -> None:
        self._scaler = optimizer.grad_scaler
        self._in_use = hasattr(optimizer, "found_inf")
        found_inf = getattr(optimizer, "found_inf", None)
        # a synchronisation that the scaler would make itself
        self.found_inf = found_inf is not None and float(found_inf) > 0
        self._of_gradients: Tensor | None = getattr(optimizer, "grad_scale", None)

    def unscale_(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, if the scaler has left that to the optimizer."""
        if self._of_gradients is not None:
            # in float32, because MPS has no float64: the reciprocal has one rounding in both
            inverse = self._of_gradients.reciprocal().float()
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
            "gradients were unscaled before step(), by a scaler that cannot be asked for the scale "
            "of the statistics that were captured; set optimizer.grad_scaler = scaler"
        )


def remove_scale(optimizer: Any) -> None:
    """Remove what GradScaler set on the optimizer, so that the next step does not divide by it."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def asked_by_lightning() -> bool:
    """Return whether Lightning asks the property that calls this.

    It does not clip the gradients of an optimizer that unscales them, because it takes its step for
    a fused one.
    """
    return "lightning" in sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
