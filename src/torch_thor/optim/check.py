"""Whether a step's gradients are finite, told by a number on the device that nothing waits for.

A host that reads such a number waits until the device has done everything before it, and the device
then waits for the host. So on an accelerator the update is done unless the number is 1
(:mod:`torch_thor.optim.update`), and the next step reads it, when it has long been there.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import WITH_PINNED_MEMORY, factor_dtype
from torch_thor.torch_internals import extension_device, fused_devices


def fused_on(device: torch.device) -> bool:
    """Return whether torch has fused optimizers for an accelerator."""
    known = (*fused_devices(), extension_device())
    return device.type not in ("cpu", "meta") and device.type in known


def accelerator_of(gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> torch.device | None:
    """Return the accelerator on which a step can be left out.

    The result is None if the host must know before the step.
    """
    devices = {gradient.device for _, gradient in gradients}
    if len(devices) != 1 or not fused_on(device := next(iter(devices))):
        return None
    # fused kernels take real weights and moments of one dtype
    plain = all(
        parameter.dtype == factor_dtype(parameter.dtype)
        and not parameter.is_complex()
        and not gradient.is_sparse
        for parameter, gradient in gradients
    )
    return device if plain else None


class Check:
    """The check of the gradients of one step."""

    def __init__(self, gradients: Sequence[tuple[nn.Parameter, Tensor]], damping: float) -> None:
        self._parameters = [parameter for parameter, _ in gradients]
        self._norms = torch.stack(torch._foreach_norm([gradient for _, gradient in gradients], 2))
        # above it the step could overflow
        most = min(1.0, damping) * torch.finfo(torch.float32).max
        self.found_inf = 1.0 - (self._norms.max() <= most).to(torch.float32)  # 1 for NaN too

    def send(self) -> None:
        """Start to copy the number to the host, without waiting for it."""
        device = self.found_inf.device
        pinned = device.type in WITH_PINNED_MEMORY
        self._on_host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=pinned)
        self._on_host.copy_(self.found_inf, non_blocking=True)
        self._event = torch.Event(device)
        self._event.record()

    def failed(self) -> bool:
        """Return whether the step has changed nothing; waits until the device has got so far."""
        self._event.synchronize()
        return bool(self._on_host)

    def bad(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are not finite."""
        return [
            p
            for p, norm in zip(self._parameters, self._norms.tolist(), strict=True)
            if not math.isfinite(norm)
        ]
