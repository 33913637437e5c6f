"""Mixed precision, and the average of the weights.

Weights, optimizer state and curvature stay float32 (Micikevicius et al. 2018); for float16, a loss
scale prevents underflow of small gradients.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_thor.capture.sharding import is_sharded
from torch_thor.errors import require

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_SKIPPED = 50  # consecutive skipped steps that are an error


class Precision:
    """The precision of a step: fp16 has a fixed loss scale, or torch's own, halved by overflows."""

    def __init__(self, name: str, loss_scale: float | None, device: torch.device) -> None:
        self.dtype, self.device, self.fixed = PRECISIONS[name], device, loss_scale
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=loss_scale or 2.0**16, enabled=self.dtype == torch.float16
        )
        self._skipped_in_a_row = 0

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass, which has no effect for fp32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss, multiplied by the loss scale, if any."""
        self.scaler.scale(loss).backward()

    def clip(self, optimizer: torch.optim.Optimizer, norm: float) -> None:
        """Scale all parameters' joint gradient down to a norm, after dividing by the loss scale."""
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], norm
        )

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take a step unless a gradient overflowed, which must not go on; return whether it did."""
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        taken = self.scaler.get_scale() >= before  # the scale decreases only after an overflow
        self._skipped_in_a_row = 0 if taken else self._skipped_in_a_row + 1
        require(
            self._skipped_in_a_row < MOST_SKIPPED,
            f"{MOST_SKIPPED} consecutive steps overflowed float16, and the loss scale is "
            f"{self.scaler.get_scale():g}: lower lr, or use precision=bf16",
        )
        if self.fixed is not None:
            self.scaler.update(self.fixed)
        return taken


def averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Average weights and buffers (Polyak and Juditsky 1992) of a model without hooks yet."""
    if decay is None:
        return None
    update = get_ema_multi_avg_fn(decay)

    def local(tensor: Any) -> Any:
        return tensor.to_local() if is_sharded(tensor) else tensor

    def update_local(averages: Sequence[Tensor], values: Sequence[Tensor], number: Any) -> None:
        if values[0].is_floating_point():
            update(
                [local(tensor) for tensor in averages], [local(tensor) for tensor in values], number
            )
        else:  # such as the positions of tokens, whose average would be rounded to another number
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)

    with torch.random.fork_rng():  # some modules draw random numbers when they are copied
        return AveragedModel(model, multi_avg_fn=update_local, use_buffers=True)
