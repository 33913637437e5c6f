"""The settings of the training loop: a script makes a `RunConfig`, and a recipe is a `RunConfig` with more keys."""

from dataclasses import dataclass, field

import torch

from torch_thor.training.config.phases import Phase, check_phases, phase_at
from torch_thor.training.config.schedules.spec import ScheduleSpec
from torch_thor.training.errors import require
from torch_thor.training.tasks.smoothing import FORMS

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_SEED = 2**63 - 1  # torch's generators take 64 bits, and each process adds its rank


def check_seed(said: str, seed: int) -> None:
    """Refuse a seed that is out of the range of torch's generators.

    Args:
        said: What the user wrote before it.
        seed: The seed.
    """
    require(0 <= seed <= MOST_SEED, f"{said}{seed} must lie in [0, {MOST_SEED}]")


@dataclass(frozen=True)
class RunConfig:
    """Length, batch size, precision and evaluations of a training.

    Args:
        epochs: Passes over the training set.
        steps: Optimizer steps of the training, in the place of `epochs`; they may be less than an epoch and need not be
            whole epochs. `None` trains for `epochs`.
        phases: Parts of the training with a batch size, or examples, of their own, one after the other; of masked-lm.
            The training ends after them, and an epoch is all of them: one pass through the phases.
        batch_size: Samples a step, on all processes together: images, or windows of a text. What is left over at the
            end of an epoch is left out.
        seed: Decides the initial weights, and with the epoch's number the order of the data.
        label_smoothing: Share of the target that labels give away, in the training loss only.
        smoothing_form: torch spreads it over all outputs; reference, as THOR's reference trainings, over all but the
            label's.
        eval_interval: Steps between evaluations; `None` is `eval_epochs`. The last step is always evaluated.
        eval_epochs: Epochs between evaluations, where `eval_interval` is `None`.
        schedule: Of the learning rate.
        damping_schedule: Of the damping, for optimizers that have one.
        device: `auto` (CUDA if there is one, else the CPU) or any device name that torch knows.
        precision: fp32; or bf16 or fp16, in which the network computes while weights and optimizer stay float32.
        loss_scale: With fp16: what the loss is multiplied by before backward; `None` finds it as training goes on.
        accumulation: Parts that the batch of a step is computed in, one after the other, to save memory.
        clip_norm: Greatest norm of the gradient of all parameters together, to which a longer one is scaled down
            before the optimizer's step (1 is usual for BERT); `None` clips nothing.
        compile: Whether `torch.compile` compiles the network.
        ema_decay: Share of the old average that an exponential moving average of the weights keeps per step (0.9999 is
            usual); it is evaluated beside the weights. `None` keeps no average.
        stop_at: Value of the task's primary metric (top-1 accuracy, in (0, 1], of a classifier) at which training ends,
            of the averaged weights where there are any; `None` trains to the end.
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
            f"smoothing_form={self.smoothing_form} is none of {', '.join(FORMS)}",
        )
        require(
            self.eval_interval is None or self.eval_interval >= 1,
            f"eval_interval={self.eval_interval} must be 1 or more steps; null evaluates every eval_epochs",
        )
        require(self.eval_epochs >= 1, f"eval_epochs={self.eval_epochs} must be 1 or more")
        require(
            self.precision in PRECISIONS,
            f"precision={self.precision} is none of {', '.join(PRECISIONS)}",
        )
        require(
            self.loss_scale is None or (self.precision == "fp16" and 0 < self.loss_scale < float("inf")),
            f"loss_scale={self.loss_scale} must be a number above 0, with precision=fp16; null elsewhere",
        )
        require(
            1 <= self.accumulation <= self.batch_size,
            f"accumulation={self.accumulation} must lie in [1, batch_size={self.batch_size}]: it is parts of a batch",
        )
        require(
            self.clip_norm is None or 0 < self.clip_norm < float("inf"),
            f"clip_norm={self.clip_norm} must be above 0, 1 is usual; null clips nothing",
        )
        require(
            self.ema_decay is None or 0 <= self.ema_decay < 1,
            f"ema_decay={self.ema_decay} must lie in [0, 1), 0.9999 is usual; null averages nothing",
        )

    def accumulation_at(self, step: int) -> int:
        """Return the parts that the batch of a step is computed in.

        Args:
            step: Steps already taken (0 for the first).

        Returns:
            Those of the step's phase, or of all steps where there are no phases.
        """
        own = phase_at(self.phases, step)[0].accumulation if self.phases else None
        return self.accumulation if own is None else own
