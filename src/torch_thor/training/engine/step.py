"""One step of training: forward, backward, the optimizer's step; in parts, in mixed precision, on several processes."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.optim import THOR
from torch_thor.training.config.run_config import RunConfig
from torch_thor.training.engine import parallel
from torch_thor.training.engine.precision import Precision
from torch_thor.training.errors import DivergedError
from torch_thor.training.tasks.smoothing import training_loss


@dataclass(frozen=True)
class StepResult:
    """What a step found, over all processes.

    Args:
        loss: Mean over its images, label smoothing included.
        images: How many.
        skipped: Whether the optimizer's step was left out because a float16 gradient overflowed.
    """

    loss: float
    images: int
    skipped: bool


class Stepper:
    """Takes the steps of a training.

    Args:
        model: The network, on its device; its weights are trained in place.
        optimizer: Its optimizer.
        config: Label smoothing, parts, precision, compilation.
        device: Where the network is.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig, device: torch.device
    ) -> None:
        self.optimizer, self.config, self.device = optimizer, config, device
        self._sampling = optimizer if isinstance(optimizer, THOR) and optimizer.fisher == "sampled" else None
        self.network = parallel.wrap(model, device)
        if config.compile:
            self.network = torch.compile(self.network)  # type: ignore[assignment]
        self.precision = Precision(config.precision, config.loss_scale, device)

    def take(self, images: Tensor, labels: Tensor, step: int) -> StepResult:
        """Take one step.

        Args:
            images: (n, C, H, W), of this process.
            labels: (n,).
            step: Its number, from 1, for messages.

        Returns:
            What it found.

        Raises:
            DivergedError: If the loss or a gradient is not finite.
        """
        loss = torch.zeros((), device=self.device)
        parts = list(zip(images.chunk(self.config.accumulation), labels.chunk(self.config.accumulation), strict=True))
        for number, (some, truth) in enumerate(parts, 1):
            last = number == len(parts)
            with nullcontext() if last else parallel.without_averaging(self.network):
                with self.precision.autocast():
                    scores = self.network(some)
                    if self._sampling is not None:
                        self._sampling.sample_fisher(scores, seed=self.config.seed)
                    mean = training_loss(scores, truth, self.config.label_smoothing, self.config.smoothing_form)
                    part = mean * (len(truth) / len(labels))
                self.precision.backward(part)
            loss += part.detach()
        try:
            taken = self.precision.step(self.optimizer)
        except FloatingPointError as error:  # THOR refuses a gradient that is not finite
            raise DivergedError(f"step {step}: {error}") from error
        self.optimizer.zero_grad()
        # waits for the device: the step is timed, and its loss is recorded
        weighted, count = parallel.total([loss.item() * len(labels), float(len(labels))], self.device)
        value = weighted / count
        if not math.isfinite(value) and taken:
            raise DivergedError(
                f"the loss became {value} at step {step} (lr={float(self.optimizer.param_groups[0]['lr']):.3g}): "
                "lower lr, add warm-up (schedule.warmup_epochs), or raise damping"
            )
        return StepResult(value, int(count), not taken)
