"""The keys of a recipe: a `RunConfig` with names, of the task, the data, the network and the optimizers."""

from dataclasses import dataclass, field
from typing import Any

from torch_thor.training.config.data_spec import DataSpec
from torch_thor.training.config.run_config import RunConfig
from torch_thor.training.errors import require
from torch_thor.training.optimizers.registry import OPTIMIZERS, default_settings
from torch_thor.training.optimizers.settings import OptimizerSettings
from torch_thor.training.tasks.registry import TASKS
from torch_thor.training.tasks.task import primary

MOST_THREADS, MOST_CLASSES = 4096, 10_000_000
# What a resumed run may change: where data are and how they are read, when a run ends, what is written and when. A key
# with a dot at its end means all inside. None of them changes what a step computes; `lengthening` checks the epochs,
# and weights are known by their checksum.
FREE_ON_RESUME = (
    "about", "reaches", "epochs", "weights",
    "data.root", "data.download", "data.workers.", "data.max_broken", "data.cache",
    "targets", "stop_at", "checkpoint_interval", "keep_checkpoints", "keep_best", "log_interval",
)  # fmt: skip
WHOLE_SETTINGS = {"update_interval", "trace_thresholds", "decay_filter"}  # THOR's, which are of more than one type


@dataclass(frozen=True)
class Recipe(RunConfig):
    """A training from beginning to end; the keys of a recipe file.

    Args:
        name: The recipe's name: its file's, without `.yaml`.
        about: One line for `torch-thor train --list`.
        reaches: What it should reach, and from where that is known; printed beside it.
        task: What is trained: image-classification, autoencoder, char-lm or masked-lm.
        data: The data set.
        model: The network: of image-classification small-cnn, small-resnet, cifar-resnet18, or an image classifier of
            torchvision's or timm's (`torchvision:NAME`, `timm:NAME`, or bare); of autoencoder deep-autoencoder; of
            char-lm char-transformer; of masked-lm bert-tiny, bert-mini, bert-base, bert-large, or the file of a
            transformers configuration (config.json). Its weights are random.
        activation_checkpointing: Whether the activations inside of each layer are computed again in the backward pass
            and not kept, which saves memory; of masked-lm.
        weights: What the network starts from in the place of random weights: a safetensors file, or what `torch-thor
            eval` takes (a checkpoint, a folder of checkpoints such as `best`, a run folder with one optimizer); `None`
            is random weights.
        weights_except: Weights that start at random all the same, by name or pattern: `[head]`.
        weights_sha256: The checksum of the file, which a run writes down; where it is given it must be right.
        classes: Outputs of the network, at least the classes of the data; `None` is that number. (The reference
            ResNet-50 has 1001 for ImageNet's 1000.)
        optimizer: The optimizers to train with, one after the other.
        optimizers: Settings of every optimizer, whether it is trained with or not.
        targets: Values of the task's primary metric (top-1 accuracies, in (0, 1], of a classifier) that the final table
            counts steps and seconds to.
        checkpoint_interval: Steps between checkpoints; `None` is one epoch. The last step is always saved.
        keep_checkpoints: Newest checkpoints to keep.
        keep_best: Whether to keep the checkpoint of the best evaluation too, in `best/`.
        log_interval: Steps between the lines that are printed where there is no terminal, and at most between points in
            TensorBoard; `None` prints a line for each evaluation only.
        threads: CPU threads; `None` leaves torch's choice. A tiny network is fastest with one, above all where other
            programs want the cores too; and a resumed run is the same bit for bit only with the same number.
        written: No key of a recipe: what was written in the place of a value that OmegaConf has resolved, by key
            (`{"data.root": "${oc.env:DATA}"}`). A file keeps this text and not the value, which may be a secret.
    """

    name: str = "unnamed"
    about: str = ""
    reaches: str = ""
    task: str = "image-classification"
    data: DataSpec = field(default_factory=DataSpec)
    model: str = "small-cnn"
    activation_checkpointing: bool = False
    weights: str | None = None
    weights_except: tuple[str, ...] = ()
    weights_sha256: str | None = None
    classes: int | None = None
    optimizer: tuple[str, ...] = ("thor", "sgd")
    optimizers: dict[str, OptimizerSettings] = field(default_factory=default_settings)
    targets: tuple[float, ...] = ()
    checkpoint_interval: int | None = None
    keep_checkpoints: int = 2
    keep_best: bool = True
    log_interval: int | None = 100
    threads: int | None = None
    written: dict[str, Any] = field(
        default_factory=dict, compare=False, repr=False, metadata={"omegaconf_ignore": True}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.task in TASKS, f"task={self.task} is not a task: use one of {', '.join(TASKS)}")
        metric = primary(TASKS[self.task].METRICS)
        if self.stop_at is not None:
            metric.check_target("stop_at", self.stop_at)
        require(
            self.threads is None or 1 <= self.threads <= MOST_THREADS,
            f"threads={self.threads} must lie in [1, {MOST_THREADS}]; null leaves torch's choice",
        )
        require(
            self.classes is None or 1 <= self.classes <= MOST_CLASSES,
            f"classes={self.classes} must lie in [1, {MOST_CLASSES}]; null is the number of the data's",
        )
        TASKS[self.task].check(self)
        require(
            self.weights is not None or (self.weights_sha256 is None and not self.weights_except),
            f"weights is not set, and weights_except={list(self.weights_except)} or "
            f"weights_sha256={self.weights_sha256} is: give weights=FILE, or leave them out",
        )
        require(len(self.optimizer) >= 1, f"optimizer is empty: name one or more of {', '.join(OPTIMIZERS)}")
        for name in (*self.optimizer, *self.optimizers):
            require(name in OPTIMIZERS, f"optimizer={name} is not an optimizer: use one of {', '.join(OPTIMIZERS)}")
        require(
            len(set(self.optimizer)) == len(self.optimizer),
            f"optimizer={','.join(self.optimizer)} names one twice: name each once",
        )
        for target in self.targets:
            metric.check_target("targets", target, list(self.targets))
        require(
            self.checkpoint_interval is None or self.checkpoint_interval >= 1,
            f"checkpoint_interval={self.checkpoint_interval} must be 1 or more steps; null is one epoch",
        )
        require(
            self.keep_checkpoints >= 1,
            f"keep_checkpoints={self.keep_checkpoints} must be 1 or more; 2 keeps one to fall back on",
        )
        require(
            self.log_interval is None or self.log_interval >= 1,
            f"log_interval={self.log_interval} must be 1 or more steps; null prints evaluations only",
        )
