"""One step of training: forward, backward, the optimizer's step; in parts, in mixed precision, on several processes."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.optim import THOR
from torch_thor.training.config.run_config import RunConfig
from torch_thor.training.engine import parallel
from torch_thor.training.engine.batch_trees import split_batch
from torch_thor.training.engine.precision import Precision
from torch_thor.training.errors import DivergedError
from torch_thor.training.tasks.task import Batch, Loss, Task


@dataclass(frozen=True)
class StepResult:
    """What a step found, over all processes.

    Args:
        loss: Mean over its loss terms, as it is trained on.
        terms: How many.
        skipped: Whether the optimizer's step was left out because a float16 gradient overflowed.
    """

    loss: float
    terms: int
    skipped: bool


class Stepper:
    """Takes the steps of a training.

    Args:
        model: The network, on its device; its weights are trained in place.
        optimizer: Its optimizer.
        task: Its loss.
        config: Parts, precision, clipping, compilation.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, config: RunConfig) -> None:
        self.optimizer, self.task, self.config = optimizer, task, config
        self._thor = _ThorInputs(optimizer, config.seed) if isinstance(optimizer, THOR) else None
        self.network = parallel.wrap(model, task.device)
        if config.compile:
            self.network = torch.compile(self.network)  # type: ignore[assignment]
        self.precision = Precision(config.precision, config.loss_scale, task.device)

    def take(self, batch: Batch, step: int) -> StepResult:
        """Take one step.

        Args:
            batch: Of this process, with one loss term or more.
            step: Its number, from 1, for messages.

        Returns:
            What it found.

        Raises:
            DivergedError: If the loss or a gradient is not finite.
        """
        loss = torch.zeros((), device=self.task.device)
        parts = [(part, self.task.terms(part)) for part in split_batch(batch, self.config.accumulation_at(step - 1))]
        whole = sum(terms.number for _, terms in parts)
        if self._thor is not None:
            self._thor.of_step(whole)
        for number, (part, terms) in enumerate(parts, 1):
            last = number == len(parts)
            with nullcontext() if last else parallel.without_averaging(self.network):
                if self._thor is not None:
                    self._thor.before_forward(terms.row_mask)
                with self.precision.autocast():
                    found = self.task.loss(self.network, part)
                    if self._thor is not None:
                        self._thor.after_forward(found)
                    share = found.mean * (terms.number / whole)
                self.precision.backward(share)
            loss += share.detach()
        if self.config.clip_norm is not None:
            self.precision.clip(self.optimizer, self.config.clip_norm)
        try:
            taken = self.precision.step(self.optimizer)
        except FloatingPointError as error:  # THOR refuses a gradient that is not finite
            raise DivergedError(f"step {step}: {error}") from error
        self.optimizer.zero_grad()
        # host-device synchronisation: the step is timed, and its loss is recorded
        weighted, count = parallel.total([loss.item() * whole, float(whole)], self.task.device)
        value = weighted / count
        if not math.isfinite(value) and taken:
            raise DivergedError(
                f"the loss became {value} at step {step} (lr={float(self.optimizer.param_groups[0]['lr']):.3g}): "
                "lower lr, add warm-up (schedule.warmup_epochs), or raise damping"
            )
        return StepResult(value, int(count), not taken)


class _ThorInputs:
    """Tells THOR the loss terms and the row mask of each step; values that the user has set stay as they are.

    Args:
        optimizer: The optimizer.
        seed: Decides which labels are drawn, where it samples them.
    """

    def __init__(self, optimizer: THOR, seed: int) -> None:
        self.optimizer, self.seed = optimizer, seed
        self._terms: int | None = None
        self._mask: Tensor | None = None

    def of_step(self, terms: int) -> None:
        """Set the number of loss terms of a step, where the scale of output gradients matters.

        Args:
            terms: Of all parts, on this process.
        """
        if self.optimizer.scaling is not None:  # of A alone, whatever N is
            return
        if self.optimizer.loss_terms == self._terms:
            self.optimizer.loss_terms = self._terms = terms

    def before_forward(self, mask: Tensor | None) -> None:
        """Set which rows of a forward pass count.

        Args:
            mask: As THOR takes it; `None` is all.
        """
        if self.optimizer.row_mask is self._mask:
            self.optimizer.row_mask = self._mask = mask

    def after_forward(self, loss: Loss) -> None:
        """Have THOR draw labels from the predictions, if its statistics come from these.

        Args:
            loss: Of the forward pass, not differentiated yet.
        """
        if self.optimizer.fisher == "sampled":
            self.optimizer.sample_fisher(loss.output, loss.distribution, dim=loss.dim, seed=self.seed)
