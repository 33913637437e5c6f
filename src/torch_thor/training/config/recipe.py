"""The keys of a recipe: those of `RunConfig`, and the names of task, data set, network and optimizers."""

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
# The keys that a resumed run may change: where the data are, when the run ends, what is written and when. A key with a
# dot at its end stands for all keys inside it. None of them changes what a step computes, except that THOR's blocks end
# where the parameters of `parallel` are divided, as with another number of processes. `lengthening` checks the
# epochs, and a checksum identifies the weights.
FREE_ON_RESUME = (
    "about", "reaches", "epochs", "weights", "parallel", "shards",
    "data.root", "data.download", "data.workers.", "data.max_broken", "data.cache",
    "targets", "stop_at", "checkpoint_interval", "keep_checkpoints", "keep_best", "log_interval",
)  # fmt: skip
WHOLE_SETTINGS = {
    "update_interval",
    "trace_thresholds",
    "decay_filter",
}  # settings of THOR that may be of more than one type


@dataclass(frozen=True)
class Recipe(RunConfig):
    """All settings of a training, which are the keys of a recipe file.

    Args:
        name: The name of the recipe; by default that of its file, without `.yaml`.
        about: A one-line description, which `torch-thor train --list` prints.
        reaches: The result that the recipe should reach and its source, which `torch-thor train --list` prints.
        task: The task: image-classification, autoencoder, char-lm or masked-lm.
        data: The data set.
        model: The network. For image-classification: small-cnn, small-resnet, cifar-resnet18, or an image classifier of
            torchvision or timm (`torchvision:NAME`, `timm:NAME`, or just `NAME`). For autoencoder: deep-autoencoder.
            For char-lm: char-transformer. For masked-lm: bert-tiny, bert-mini, bert-base, bert-large, or the path of a
            transformers configuration (`config.json`). Weights are random unless `weights` is given.
        activation_checkpointing: Whether activations inside each layer are computed again in the backward pass instead
            of being kept, which saves memory. For masked-lm only.
        weights: The weights that the network starts from: a safetensors file, a checkpoint, a folder of checkpoints
            such as `best`, or a run folder with one optimizer. `None` starts from random weights.
        weights_except: Weights that are not loaded and stay random, by name or pattern: `[head]`.
        weights_sha256: SHA-256 of the file of `weights`, or of `manifest.json` of a checkpoint that several processes
            have written in parts. A run records it; if a recipe gives it, the file must match.
        classes: Number of outputs of the classifier, at least the number of classes in the data, which is the default
            (`None`). The reference ResNet-50 has 1001 outputs for the 1000 classes of ImageNet.
        optimizer: The optimizers to train with, one after the other.
        optimizers: The settings of every optimizer, also of those that are not used.
        targets: Values of the task's primary metric (for a classifier: top-1 accuracies in (0, 1]). The final table
            gives the steps and seconds that each optimizer needed to reach them.
        checkpoint_interval: Steps between checkpoints; `None` stands for one epoch. The last step is always saved.
        keep_checkpoints: Number of newest checkpoints to keep.
        keep_best: Whether to keep, in `best/`, also the checkpoint of the best evaluation.
        log_interval: Steps between printed progress lines, where the output is not a terminal; also the largest number
            of steps between points in TensorBoard. `None` prints a line for each evaluation only.
        threads: Number of CPU threads; `None` leaves the choice to torch. Small networks train fastest with one thread.
            A resumed run is bit for bit the same only with the same number.
        written: Not a key of a recipe. The text that stood in the recipe for each value that OmegaConf has resolved, by
            key (`{"data.root": "${oc.env:DATA}"}`). Files contain this text instead of the value, which may be secret.
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
            f"classes={self.classes} must lie in [1, {MOST_CLASSES}]; null takes the number of classes of the data",
        )
        TASKS[self.task].check(self)
        require(
            self.weights is not None or (self.weights_sha256 is None and not self.weights_except),
            f"weights is not set, but weights_except={list(self.weights_except)} or "
            f"weights_sha256={self.weights_sha256} is: give weights=FILE, or leave them out",
        )
        require(len(self.optimizer) >= 1, f"optimizer is empty: name one or more of {', '.join(OPTIMIZERS)}")
        for name in (*self.optimizer, *self.optimizers):
            require(name in OPTIMIZERS, f"optimizer={name} is not an optimizer: use one of {', '.join(OPTIMIZERS)}")
            why = OPTIMIZERS[name].undivided
            require(
                self.parallel == "ddp" or why is None or name not in self.optimizer,
                f"parallel={self.parallel}: optimizer={name} cannot train divided parameters, because {why}; use "
                "parallel=ddp or another optimizer",
            )
        require(
            len(set(self.optimizer)) == len(self.optimizer),
            f"optimizer={','.join(self.optimizer)} names an optimizer twice: name each once",
        )
        for target in self.targets:
            metric.check_target("targets", target, list(self.targets))
        require(
            self.checkpoint_interval is None or self.checkpoint_interval >= 1,
            f"checkpoint_interval={self.checkpoint_interval} must be 1 or more steps; null is one epoch",
        )
        require(
            self.keep_checkpoints >= 1,
            f"keep_checkpoints={self.keep_checkpoints} must be 1 or more; 2 leaves one if the newest is damaged",
        )
        require(
            self.log_interval is None or self.log_interval >= 1,
            f"log_interval={self.log_interval} must be 1 or more steps; null prints evaluations only",
        )
