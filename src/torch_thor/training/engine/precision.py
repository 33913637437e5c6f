"""Mixed precision: autocast, and for float16 a loss scale that prevents underflow of small gradients.

Weights, optimizer state and curvature stay float32 (Micikevicius et al. 2018).
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torch_thor.training.config.run_config import PRECISIONS
from torch_thor.training.errors import UserError

NEVER = 2**31 - 1  # growth interval in steps of a fixed scale, which never grows
MOST_SKIPPED = 50  # consecutive skipped steps that are an error


class Precision:
    """The precision of a training step.

    Args:
        name: A key of `PRECISIONS`.
        loss_scale: With fp16, a fixed scale. `None` is a scale that is halved after each overflow and doubled after
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
        """Return the context of a forward pass.

        Returns:
            Autocast to the chosen precision; it has no effect for fp32.
        """
        context: AbstractContextManager[None] = torch.autocast(
            self.device.type, self.dtype, enabled=self.dtype != torch.float32
        )
        return context

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss, multiplied by the loss scale if there is one.

        Args:
            loss: The loss, a tensor without dimensions.
        """
        self.scaler.scale(loss).backward()

    def clip(self, optimizer: torch.optim.Optimizer, norm: float) -> None:
        """Clip the norm of the gradient over all parameters together, after dividing the gradient by the loss scale.

        Args:
            optimizer: The optimizer of the parameters, whose gradients must be those of the whole step.
            norm: The maximum norm. A larger gradient is scaled down to it; a smaller one does not change.
        """
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], norm)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the optimizer's step, unless a gradient overflowed.

        Args:
            optimizer: The optimizer.

        Returns:
            Whether the step was taken.

        Raises:
            UserError: If `MOST_SKIPPED` consecutive steps overflow.
        """
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

    def state_dict(self) -> dict[str, object]:
        """Return the state of the loss scale.

        Returns:
            Plain values; empty if there is no loss scale.
        """
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the state of the loss scale.

        Args:
            state: From `state_dict`.
        """
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state)
