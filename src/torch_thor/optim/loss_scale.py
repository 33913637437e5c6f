"""The loss scale of a GradScaler: by how much it has scaled gradients, and whether the step must be skipped."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class LossScale:
    """The loss scale in the current step."""

    # GradScaler does not unscale gradients or skip steps for an optimizer that sets `_step_supports_amp_scaling`.
    # Instead it sets two tensors as attributes of the optimizer, `grad_scale` and `found_inf`. From a plain
    # `scaler.step(optimizer)` the scale of the captured output gradients cannot be learnt in any other way. If the user
    # has called `scaler.unscale_`, it sets no scale, and the scaler itself is asked.

    def __init__(self, optimizer: Any, grad_scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = grad_scaler
        self._in_use = hasattr(optimizer, "found_inf")
        self._found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self.of_gradients: Tensor | None = getattr(optimizer, "grad_scale", None)

    @property
    def found_inf(self) -> bool:
        """Whether the scaler has found inf, so that the step must be skipped (a host–device synchronisation)."""
        # The scaler would otherwise make this synchronisation itself.
        return self._found_inf is not None and float(self._found_inf) > 0

    def unscale_(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, if the scaler has left that to the optimizer."""
        if self.of_gradients is not None:
            inverse = self.of_gradients.double().reciprocal().float()
            for gradient in gradients:
                gradient.mul_(inverse.to(gradient.device))

    def of_outputs(self) -> float:
        """Return the scale of the captured output gradients."""
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


def remove_scale(optimizer: Any) -> None:
    """Remove what GradScaler has set on the optimizer, so that the next step does not divide by it."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def _calling_scaler() -> torch.amp.GradScaler | None:
    """Return the GradScaler that is calling the optimizer's ``step``, by looking at the call stack."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            return caller
        frame = frame.f_back
    return None
