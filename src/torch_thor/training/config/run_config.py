"""The settings of the training loop. A script makes a `RunConfig`; a recipe is a `RunConfig` with more keys."""

from dataclasses import dataclass, field

import torch

from torch_thor.training.config.phases import Phase, check_phases, phase_at
from torch_thor.training.config.schedules.spec import ScheduleSpec
from torch_thor.training.errors import require
from torch_thor.training.tasks.smoothing import FORMS

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARALLEL = ("ddp", "fsdp", "hsdp")
MOST_SEED = 2**63 - 1  # torch's generators take 64 bits, and each process adds its rank


def check_seed(said: str, seed: int) -> None:
    """Refuse a seed that is out of the range of torch's generators.

    Args:
        said: The text before the value in the error message, such as `seed=`.
        seed: The seed.

    Raises:
        UserError: If the seed is out of range.
    """
    require(0 <= seed <= MOST_SEED, f"{said}{seed} must lie in [0, {MOST_SEED}]")


@dataclass(frozen=True)
class RunConfig:
    """The settings of a training: its length, batch size, precision, schedules and evaluations.

    Args:
        epochs: Passes over the training set.
        steps: Optimizer steps of the training, instead of `epochs`. The last epoch may be incomplete. `None` trains for
            `epochs`.
        phases: Parts of the training with their own batch size or length of examples, one after the other. For
            masked-lm only. The training ends after the last phase, and an epoch is one pass through all phases.
        batch_size: Samples per step, on all processes together: images, or windows of a text. Samples that do not fill
            a batch at the end of an epoch are dropped.
        seed: Determines the initial weights and, together with the epoch, the order of the data.
        label_smoothing: Probability s that label smoothing moves from the label to the other outputs, in [0, 1). Only
            the training loss uses it.
        smoothing_form: How label smoothing distributes s. torch: equally over all outputs, the label among them.
            reference, as in THOR's reference trainings: equally over all outputs except the label.
        eval_interval: Steps between evaluations; `None` uses `eval_epochs`. The last step is always evaluated.
        eval_epochs: Epochs between evaluations, if `eval_interval` is `None`.
        schedule: Schedule of the learning rate.
        damping_schedule: Schedule of the damping, for optimizers that have one.
        device: `auto` (CUDA if available, otherwise the CPU), or any device name that torch accepts.
        parallel: What several processes share. ddp: each holds the whole network. fsdp: each holds a part of every
            parameter, of its gradient and of its optimizer state. hsdp: groups of `shards` processes each divide a
            copy of the network. A single process holds the whole network in any case.
        shards: Number of processes that divide a copy of the network, for parallel=hsdp only; it must divide the number
            of processes. `None` stands for the processes of one machine.
        precision: Precision of the forward and backward pass: fp32, or bf16 or fp16 (autocast). Weights and optimizer
            state are always float32.
        loss_scale: Factor on the loss before the backward pass, with fp16 only; `None` adapts it during the training.
        accumulation: Number of micro-batches into which the batch of a step is divided, to save memory.
        clip_norm: Largest norm of the gradient of all parameters together; a longer gradient is scaled down to it
            before the optimizer's step. 1 is usual for BERT. `None` clips nothing.
        compile: Whether `torch.compile` compiles the network.
        ema_decay: Decay per step of an exponential moving average of the weights (0.9999 is usual). The averaged
            weights are evaluated as well. `None` keeps no average.
        stop_at: Value of the task's primary metric (for a classifier: top-1 accuracy in (0, 1]) at which training ends.
            The averaged weights decide if there are any. `None` trains to the end.
    """

    epochs: int = 1
    steps: int | None = None
    phases: list[Phase] = field(default_factory=list)  # OmegaConf knows lists of mappings, and no tuples of them
    batch_size: int = 128
    seed: int = 0
    label_smoothing: float = 0.0
    smoothing_form: str = "torch"
    eval_interval: int | None = None
    eval_epochs: int = 1
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    damping_schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    device: str = "auto"
    parallel: str = "ddp"
    shards: int | None = None
    precision: str = "fp32"
    loss_scale: float | None = None
    accumulation: int = 1
    clip_norm: float | None = None
    compile: bool = False
    ema_decay: float | None = None
    stop_at: float | None = None

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"epochs={self.epochs} must be 1 or more")
        require(
            self.steps is None or self.steps >= 1,
            f"steps={self.steps} must be 1 or more optimizer steps; null trains for epochs",
        )
        require(self.batch_size >= 1, f"batch_size={self.batch_size} must be 1 or more")
        check_phases(
            self.phases,
            epochs=self.epochs,
            steps=self.steps,
            batch_size=self.batch_size,
            accumulation=self.accumulation,
        )
        check_seed("seed=", self.seed)
        require(0 <= self.label_smoothing < 1, f"label_smoothing={self.label_smoothing} must lie in [0, 1)")
        require(
            self.smoothing_form in FORMS,
            f"smoothing_form={self.smoothing_form} must be one of {', '.join(FORMS)}",
        )
        require(
            self.eval_interval is None or self.eval_interval >= 1,
            f"eval_interval={self.eval_interval} must be 1 or more steps; null evaluates every eval_epochs",
        )
        require(self.eval_epochs >= 1, f"eval_epochs={self.eval_epochs} must be 1 or more")
        require(
            self.parallel in PARALLEL,
            f"parallel={self.parallel} must be one of {', '.join(PARALLEL)}",
        )
        require(
            self.shards is None or (self.parallel == "hsdp" and self.shards >= 2),
            f"shards={self.shards} must be 2 or more, and needs parallel=hsdp; null otherwise",
        )
        require(
            self.precision in PRECISIONS,
            f"precision={self.precision} must be one of {', '.join(PRECISIONS)}",
        )
        require(
            self.loss_scale is None or (self.precision == "fp16" and 0 < self.loss_scale < float("inf")),
            f"loss_scale={self.loss_scale} must be a number above 0, and needs precision=fp16; use null otherwise",
        )
        require(
            1 <= self.accumulation <= self.batch_size,
            f"accumulation={self.accumulation} must lie in [1, batch_size={self.batch_size}]: it is a number of "
            "micro-batches",
        )
        require(
            self.clip_norm is None or 0 < self.clip_norm < float("inf"),
            f"clip_norm={self.clip_norm} must be above 0, 1 is usual; null clips nothing",
        )
        require(
            self.ema_decay is None or 0 <= self.ema_decay < 1,
            f"ema_decay={self.ema_decay} must lie in [0, 1); 0.9999 is usual, and null keeps no average",
        )

    def accumulation_at(self, step: int) -> int:
        """Return the parts that the batch of a step is computed in.

        Args:
            step: Steps already taken (0 for the first).

        Returns:
            Those of the step's phase, or of all steps where there are no phases.
        """
        own = self.phases[phase_at(self.phases, step)[0]].accumulation if self.phases else None
        return self.accumulation if own is None else own
