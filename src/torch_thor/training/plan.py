"""What the loop needs to know: a benchmark script builds a `Plan` by hand, a recipe is one with more keys."""

from dataclasses import dataclass, field

from torch_thor.training.errors import require
from torch_thor.training.schedules import ScheduleSpec


@dataclass(frozen=True)
class Plan:
    """How long, how large, how often.

    Args:
        epochs: Passes over the training set.
        batch_size: Images a step; the last incomplete batch of an epoch is left out.
        seed: Decides the initial weights, and with the epoch's number the order of the data.
        label_smoothing: As in `torch.nn.functional.cross_entropy`; in the training loss only.
        eval_interval: Steps between evaluations; `None` is one epoch. The last step is always evaluated.
        schedule: Of the learning rate.
        damping_schedule: Of the damping, for optimizers that have one.
        device: `auto` (CUDA if there is one, else the CPU) or any device name that torch knows.
    """

    epochs: int = 1
    batch_size: int = 128
    seed: int = 0
    label_smoothing: float = 0.0
    eval_interval: int | None = None
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    damping_schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    device: str = "auto"

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"epochs={self.epochs} must be 1 or more")
        require(self.batch_size >= 1, f"batch_size={self.batch_size} must be 1 or more")
        require(self.seed >= 0, f"seed={self.seed} must be 0 or more")
        require(0 <= self.label_smoothing < 1, f"label_smoothing={self.label_smoothing} must lie in [0, 1)")
        require(
            self.eval_interval is None or self.eval_interval >= 1,
            f"eval_interval={self.eval_interval} must be 1 or more steps; null evaluates after each epoch",
        )
