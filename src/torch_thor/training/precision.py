"""Mixed precision, and the average of the weights.

Weights, optimizer state and curvature stay float32 (Micikevicius et al. 2018); for float16, a loss scale prevents
underflow of small gradients.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_thor.capture.sharding import is_sharded
from torch_thor.training.errors import UserError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NEVER = 2**31 - 1  # growth interval in steps of a fixed scale, which never grows
MOST_SKIPPED = 50  # consecutive skipped steps that are an error


class Precision:
    """The precision of a training step.

    Args:
        name: A key of `PRECISIONS`.
        loss_scale: With fp16, a fixed scale. None is a scale that is halved after each overflow and doubled after
            2,000 steps without overflow (torch's defaults).
        device: The device of the network.
    """

    def __init__(self, name: str, loss_scale: float | None, device: torch.device) -> None:
        self.dtype, self.device = PRECISIONS[name], device
        self.fixed = None if loss_scale is None else float(loss_scale)  # torch does not accept an int
        scaling = self.dtype == torch.float16
        options = {} if self.fixed is None else {"init_scale": self.fixed, "growth_interval": NEVER}
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaling, **options)  # type: ignore[arg-type]
        self._skipped_in_a_row = 0

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass, which has no effect for fp32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss, multiplied by the loss scale if there is one."""
        self.scaler.scale(loss).backward()

    def clip(self, optimizer: torch.optim.Optimizer, norm: float) -> None:
        """Scale the gradient of all parameters together down to a norm, after dividing it by the loss scale."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], norm)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the optimizer's step unless a gradient overflowed: whether it was taken. Many overflows are an error."""
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        taken = self.scaler.get_scale() >= before  # the scale decreases only after an overflow
        self._skipped_in_a_row = 0 if taken else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise UserError(
                f"{MOST_SKIPPED} consecutive steps overflowed float16, and the loss scale is "
                f"{self.scaler.get_scale():g}: lower lr, or use precision=bf16"
            )
        if self.fixed is not None and not taken:
            self.scaler.update(new_scale=self.fixed)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale, plain values; empty if there is none."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the loss scale."""
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


def averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Create an exponential moving average of the weights and buffers (Polyak and Juditsky 1992).

    It is created before the optimizer, because a copy would keep THOR's hooks, and before the network is divided.

    Args:
        model: The network, on its device.
        decay: Decay of the average per step.

    Returns:
        The average; None if the decay is None.
    """
    if decay is None:
        return None
    update = get_ema_multi_avg_fn(decay)

    def own_parts(averages: Sequence[Tensor], values: Sequence[Tensor], number: Any) -> None:
        if values[0].is_floating_point():
            update([_own(tensor) for tensor in averages], [_own(tensor) for tensor in values], number)
        else:  # such as the positions of tokens, whose average would be rounded to another number
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)

    with torch.random.fork_rng():  # some modules draw random numbers when they are copied
        return AveragedModel(model, multi_avg_fn=own_parts, use_buffers=True)


def _own(tensor: Any) -> Any:
    return tensor.to_local() if is_sharded(tensor) else tensor
