"""One step of the training: forward and backward passes, perhaps in micro-batches, and the step of the optimizer."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.optim import THOR
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.training.config.run_config import RunConfig
from torch_thor.training.engine import parallel, sharding
from torch_thor.training.engine.batch_trees import split_batch
from torch_thor.training.engine.precision import Precision
from torch_thor.training.errors import DivergedError, require
from torch_thor.training.tasks.task import Batch, Loss, Task


@dataclass(frozen=True)
class StepResult:
    """The result of a step, over all processes.

    Args:
        loss: The training loss, a mean over the loss terms.
        terms: The number of loss terms.
        skipped: Whether the optimizer's step was skipped because a gradient was not finite.
    """

    loss: float
    terms: int
    skipped: bool


class Stepper:
    """Takes the steps of a training.

    Args:
        model: The network, on its device; its weights are changed in place.
        optimizer: Its optimizer.
        task: The task, which computes the loss.
        config: The settings of accumulation, precision, clipping and compilation.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, config: RunConfig) -> None:
        self.optimizer, self.task, self.config = optimizer, task, config
        self._thor = _ThorInputs(optimizer, config.seed) if isinstance(optimizer, CurvatureOptimizer) else None
        self._weight = parallel.RankWeight()
        self.network = self._connected(model)
        if config.compile:
            self.network = torch.compile(self.network)  # type: ignore[assignment]
        self.precision = Precision(config.precision, config.loss_scale, task.device)

    def _connected(self, model: nn.Module) -> nn.Module:
        """Return the network whose gradients are averaged over all processes."""
        if sharding.is_divided(model):
            sharding.weigh_gradients(model, self._weight)
            return model
        require(
            self.config.parallel == "ddp" or parallel.shard().world_size == 1,
            f"parallel={self.config.parallel}, but the network is not divided: call divide(...) before the "
            "optimizer is made, or use parallel=ddp",
        )
        return parallel.wrap(model, self.task.device, self._weight)

    def take(self, batch: Batch, step: int) -> StepResult:
        """Take one step.

        Args:
            batch: The batch of this process, with at least one loss term.
            step: The number of the step, from 1, for messages.

        Returns:
            The loss, and whether the step was skipped.

        Raises:
            DivergedError: If the loss or a gradient is not finite.
        """
        loss = torch.zeros((), device=self.task.device)
        parts = [(part, self.task.terms(part)) for part in split_batch(batch, self.config.accumulation_at(step - 1))]
        whole = sum(terms.number for _, terms in parts)
        self._weight.set(whole, self.task.device)
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
        skips = getattr(self.optimizer, "skipped_steps", 0)  # THOR with nonfinite="skip" counts its own
        try:
            taken = self.precision.step(self.optimizer)
        except FloatingPointError as error:  # THOR refuses a gradient that is not finite
            raise DivergedError(f"step {step}: {error}") from error
        taken = taken and getattr(self.optimizer, "skipped_steps", 0) == skips
        self.optimizer.zero_grad()
        # host-device synchronisation, because the step is timed and its loss recorded
        weighted, count = parallel.total([loss.item() * whole, float(whole)], self.task.device)
        value = weighted / count
        if not math.isfinite(value) and taken:
            raise DivergedError(
                f"the loss became {value} at step {step} (lr={float(self.optimizer.param_groups[0]['lr']):.3g}): "
                "lower lr, add warm-up (schedule.warmup_epochs), or raise damping"
            )
        return StepResult(value, int(count), not taken)


class _ThorInputs:
    """Sets THOR's `loss_terms` and `row_mask` for each step, unless the user has set them.

    Args:
        optimizer: The optimizer.
        seed: The seed of the labels that are drawn with `fisher="sampled"`.
    """

    def __init__(self, optimizer: CurvatureOptimizer, seed: int) -> None:
        self.optimizer, self.seed = optimizer, seed
        self._terms: int | None = None
        self._mask: Tensor | None = None

    def of_step(self, terms: int) -> None:
        """Set the number of loss terms of a step, if THOR needs it to scale output gradients.

        Args:
            terms: The loss terms of all micro-batches on this process.
        """
        if "G" not in self.optimizer.sides:  # the factor A does not depend on the number of loss terms
            return
        if self.optimizer.loss_terms == self._terms:
            self.optimizer.loss_terms = self._terms = terms

    def before_forward(self, mask: Tensor | None) -> None:
        """Set the rows of a forward pass that enter the statistics.

        Args:
            mask: The row mask, True for rows that count; `None` stands for all rows.
        """
        if self.optimizer.row_mask is self._mask:
            self.optimizer.row_mask = self._mask = mask

    def after_forward(self, loss: Loss) -> None:
        """Let THOR draw labels from the predictions, with `fisher="sampled"`.

        Args:
            loss: The loss of the forward pass, before the backward pass.
        """
        if isinstance(self.optimizer, THOR) and self.optimizer.fisher == "sampled":
            self.optimizer.sample_fisher(loss.output, loss.distribution, dim=loss.dim, seed=self.seed)
