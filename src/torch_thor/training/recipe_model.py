"""The keys of a recipe with their types, defaults, rules and meanings."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from torch_thor.errors import require
from torch_thor.training.models.bert import CONFIGURATION
from torch_thor.training.optimizers import AUTO, OPTIMIZERS, Settings
from torch_thor.training.recipe_keys import (
    Count,
    Keys,
    LayerParameter,
    NotNegative,
    Number,
    Positive,
    Rules,
    Whole,
)
from torch_thor.training.tasks import TASKS

IN_MEMORY = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28)}  # shapes of their images
FOLDER, CIFAR_SETS, TEXTS = "image-folder", ("cifar10", "cifar100"), ("python-text", "corpus")
# for data sets that are downloaded or prepared, if a recipe names no folder
CACHE = "~/.cache/torch-thor"
# The keys that a resumed run may change: where the data are, when the run ends, what
# is written and when. A key with a dot at its end stands for all keys inside it. None of them
# changes what a step computes, except that THOR's blocks end where the parameters of `parallel` are
# divided, as with another number of processes.
FREE_ON_RESUME = (
    "about", "reaches", "epochs", "weights", "parallel", "shards", "data.root", "data.download",
    "data.workers.",
    "data.max_broken", "targets", "stop_at", "checkpoint_interval", "keep_checkpoints", "keep_best",
    "log_interval",
)  # fmt: skip

Share = Annotated[Number, Field(ge=0, le=1)]
Factor = Annotated[Number, Field(gt=0, le=1)]
Tokens = Annotated[Whole, Field(ge=16)]
Pair = tuple[Positive, Positive]


def _place(text: str) -> str:
    """Return the absolute path that a text names, with `~` and `$NAME` in it replaced."""
    path = os.path.expandvars(text)
    require("$" not in path, "set the environment variable that it names")
    return str(Path(path).expanduser().absolute())


Place = Annotated[str, AfterValidator(_place)]


class Transform(Keys):
    """How images are cropped, flipped and normalised; by default as is usual for ImageNet."""

    size: Count = Field(224, description="height and width of the network's input")
    resize: Count = Field(256, description="shorter side before the centre crop of evaluation")
    scale: Pair = Field(
        (0.08, 1.0), description="share of the area in a random crop: smallest, largest"
    )
    ratio: Pair = Field(
        (3 / 4, 4 / 3), description="width / height of a random crop: smallest, largest"
    )
    flip: Share = Field(0.5, description="probability of a horizontal flip")
    padding: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="pixels around a random crop of fixed size; null crops at random sizes"
    )
    mean: tuple[Share, Share, Share] = Field(
        (0.485, 0.456, 0.406), description="mean of each channel, of pixels in [0, 1]"
    )
    std: tuple[Factor, Factor, Factor] = Field(
        (0.229, 0.224, 0.225), description="deviation of each channel, of pixels in [0, 1]"
    )

    def rules(self) -> Rules:
        """Compare the sizes, and the ends of the ranges."""
        return (
            (
                self.resize < self.size,
                f"resize={self.resize} must be size={self.size} or more: the centre is cropped "
                "from it",
            ),
            (
                not self.scale[0] <= self.scale[1] <= 1,
                f"scale={list(self.scale)} must be two shares of the area, 0 < smallest <= largest "
                "<= 1",
            ),
            (
                self.ratio[0] > self.ratio[1],
                f"ratio={list(self.ratio)} must be two ratios, 0 < smallest <= largest",
            ),
        )


CIFAR = Transform(size=32, resize=32, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


class Workers(Keys):
    """The processes that make batches. The batches are the same for any number."""

    count: Annotated[Whole, Field(ge=0)] = Field(
        4, description="processes that make batches; 0: the training itself"
    )
    prefetch: Count = Field(2, description="batches that each of them makes ahead")


class Text(Keys):
    """The examples of a masked language model."""

    length: Tokens = Field(
        128, description="tokens of an example; evaluations always have this length"
    )
    masked: Annotated[Number, Field(gt=0, lt=1)] = Field(
        0.15, description="share of tokens that are predicted"
    )
    whole_words: bool = Field(False, description="mask all pieces of a word together")
    next_sentence: bool = Field(
        True, description="train on pairs of segments, and whether the second follows the first"
    )
    vocab_size: Annotated[Whole, Field(ge=100)] = Field(
        4096, description="word pieces made for python-text"
    )


class Data(Keys):
    """The data set, its folder, and how it is read."""

    name: Literal[
        "digits", "fashion-mnist", "cifar10", "cifar100", "image-folder", "python-text", "corpus"
    ] = Field("digits", description="the data set; a corpus is written by `torch-thor prepare`")
    root: Place | None = Field(
        None, description=f"its folder, in which ~ and $NAME are replaced; null: {CACHE}"
    )
    download: bool = Field(True, description="download missing files, of sets that can be")
    transform: Transform | None = Field(
        None, description="crops of images; null: the usual crops of the data set"
    )
    workers: Workers = Field(Workers(), description="processes that make batches")
    max_broken: LayerParameter = Field(
        0.01, description="largest share of images in an epoch that may be unreadable"
    )
    text: Text = Field(Text(), description="examples of a masked language model")

    def rules(self) -> Rules:
        """Refuse crops of what is not cropped, and a folder of what has none."""
        return (
            (
                self.transform is not None and self.name in (*IN_MEMORY, *TEXTS),
                f"transform is set, but {self.name} is used without crops: leave it out",
            ),
            (
                self.root is not None and self.name == "digits",
                f"root={self.root}: digits is part of scikit-learn and has no folder: leave root "
                "out, or name another data set in data.name",
            ),
        )

    @property
    def crops(self) -> Transform:
        """The transform that is given, or the data set's usual transform."""
        return self.transform or (Transform() if self.name == FOLDER else CIFAR)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image as the network sees it."""
        return IN_MEMORY.get(self.name) or (3, self.crops.size, self.crops.size)

    def folder(self) -> Path:
        """Return the folder of the files."""
        return Path(self.root or CACHE).expanduser()


class Schedule(Keys):
    """A schedule of the learning rate or of the damping; `schedules` has its formulas."""

    kind: Literal[
        "constant",
        "linear",
        "cosine",
        "polynomial",
        "exponential",
        "step",
        "thor-lr",
        "thor-damping",
    ] = Field("constant", description="the formula; it ignores the keys of other formulas")
    warmup_epochs: NotNegative = Field(0.0, description="length of a linear warm-up in epochs")
    warmup_steps: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="the same in steps"
    )
    final: Share = Field(0.0, description="factor at the horizon of linear, cosine, polynomial")
    rate: Factor = Field(
        1.0, description="factor per epoch (exponential) or per ten epochs (thor-damping)"
    )
    end: NotNegative | None = Field(
        None, description="value at the horizon, in the place of `final`"
    )
    power: Positive = Field(1.0, description="exponent of polynomial")
    milestones: tuple[Positive, ...] = Field(
        (), description="epochs after which step multiplies by `gamma`"
    )
    gamma: Factor = Field(0.1, description="factor at each milestone")
    decay: Positive = Field(1.0, description="exponent of thor-lr")
    decay_epochs: NotNegative | None = Field(
        None, description="epoch from which thor-lr is halved, and again one later; null: never"
    )
    horizon_epochs: Positive | None = Field(
        None, description="where it ends, in epochs; null: with the training"
    )
    horizon_steps: Count | None = Field(None, description="the same in steps")

    def rules(self) -> Rules:
        """Refuse what is said twice, and milestones that are missing or do not increase."""
        return (
            *(
                (
                    bool(getattr(self, first)) and getattr(self, other) is not None,
                    f"{first}={getattr(self, first)} and {other}={getattr(self, other)} say the "
                    "same: give one",
                )
                for first, other in (
                    ("warmup_epochs", "warmup_steps"),
                    ("final", "end"),
                    ("horizon_epochs", "horizon_steps"),
                )
            ),
            (
                list(self.milestones) != sorted(set(self.milestones))
                or (self.kind == "step" and not self.milestones),
                f"milestones={list(self.milestones)} must be the epochs after which kind=step "
                "multiplies, and increase, such as [30, 60, 80]",
            ),
        )

    @property
    def ends_with_training(self) -> bool:
        """Whether its values depend on the length of the training."""
        return (
            self.kind in ("linear", "cosine", "polynomial", "thor-lr")
            and self.horizon_epochs is None
            and self.horizon_steps is None
        )


class Phase(Keys):
    """One phase of a training."""

    steps: Count = Field(description="steps of the phase")
    length: Tokens | None = Field(None, description="tokens of an example; null: data.text.length")
    batch_size: Count | None = Field(None, description="samples of a step; null: the recipe's")
    accumulation: Count | None = Field(None, description="parts of a batch; null: the recipe's")
    lr_factor: Positive = Field(1.0, description="factor on the learning rate")
    schedule: Schedule | None = Field(
        None,
        description="the phase's own, for which it is one epoch; null continues the training's",
    )


class Training(Keys):
    """The length, batches, schedules and arithmetic of a training."""

    epochs: Count = Field(1, description="passes over the training set")
    steps: Count | None = Field(None, description="length in steps; null: epochs")
    phases: tuple[Phase, ...] = Field(
        (), description="parts with batches or examples of their own, for masked-lm"
    )
    batch_size: Count = Field(128, description="samples of a step, on all processes together")
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = Field(
        0, description="of weights, order of data and dropout"
    )
    label_smoothing: LayerParameter = Field(
        0.0, description="probability that is moved from the label to the other outputs"
    )
    smoothing_form: Literal["torch", "reference"] = Field(
        "torch", description="to all outputs, or all but the label"
    )
    eval_interval: Count | None = Field(
        None, description="steps between evaluations; null: eval_epochs"
    )
    eval_epochs: Count = Field(1, description="epochs between evaluations")
    schedule: Schedule = Field(Schedule(), description="schedule of the learning rate")
    damping_schedule: Schedule = Field(
        Schedule(), description="schedule of the damping; keys as in schedule"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto: CUDA if available")
    parallel: Literal["ddp", "fsdp", "hsdp"] = Field(
        "ddp",
        description="each process has the whole network, a part, or groups of `shards` have parts",
    )
    shards: Annotated[Whole, Field(ge=2)] | None = Field(
        None, description="processes of an hsdp group; null: of a machine"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="of forward and backward pass"
    )
    loss_scale: Positive | None = Field(
        None, description="factor on the loss with fp16; null adapts it"
    )
    accumulation: Count = Field(1, description="parts in which a batch is computed, to save memory")
    clip_norm: Positive | None = Field(None, description="largest norm of the whole gradient")
    compile: bool = Field(False, description="compile the network by torch.compile")
    ema_decay: LayerParameter | None = Field(
        None, description="decay per step of an average of the weights, such as 0.9999"
    )
    stop_at: Positive | None = Field(
        None, description="value of the primary metric at which the training ends"
    )

    def rules(self) -> Rules:
        """Compare the lengths and sizes."""
        phased = sum(phase.steps for phase in self.phases)
        sizes = [
            (phase.accumulation or self.accumulation, phase.batch_size or self.batch_size)
            for phase in self.phases
        ] or [(self.accumulation, self.batch_size)]
        return (
            (
                phased > 0 and self.steps not in (None, phased),
                f"steps={self.steps} is not the sum of the phases' steps, {phased}: leave it out",
            ),
            *(
                (
                    parts > size,
                    f"accumulation={parts} is more than batch_size={size}: it is parts of a batch",
                )
                for parts, size in sizes
            ),
            (
                self.shards is not None and self.parallel != "hsdp",
                f"shards={self.shards} needs parallel=hsdp: set it, or leave shards out",
            ),
            (
                self.loss_scale is not None and self.precision != "fp16",
                f"loss_scale={self.loss_scale} needs precision=fp16: set it, or leave loss_scale "
                "out",
            ),
        )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of the whole training."""
        return (
            self.steps or sum(phase.steps for phase in self.phases) or self.epochs * steps_per_epoch
        )

    def phase_at(self, step: int) -> tuple[Phase | None, int]:
        """Return the phase of a step (from 0), None without phases, and the steps before it."""
        first = 0
        for phase in self.phases[:-1]:
            if step < first + phase.steps:
                return phase, first
            first += phase.steps
        return (self.phases[-1] if self.phases else None), first

    def accumulation_at(self, step: int) -> int:
        """Return the number of parts in which the batch of a step (0 for the first) is computed."""
        phase = self.phase_at(step)[0]
        return (phase and phase.accumulation) or self.accumulation


class Recipe(Training):
    """All settings of a training."""

    name: str = Field("unnamed", description="by default the file's")
    about: str = Field("", description="what it trains, in one line")
    reaches: str = Field("", description="what it should reach, and who says so")
    task: Literal[tuple(TASKS)] = Field(  # type: ignore[valid-type]
        "image-classification", description="what is learned"
    )
    data: Data = Field(Data(), description="the data set")
    model: Annotated[
        str, AfterValidator(lambda name: _place(name) if name.endswith(CONFIGURATION) else name)
    ] = Field(
        "small-cnn",
        description="the network: a name of torch-thor, torchvision:NAME, timm:NAME, ...",
    )
    activation_checkpointing: bool = Field(
        False, description="compute activations twice to save memory, for masked-lm"
    )
    weights: Place | None = Field(
        None, description="file, checkpoint or run folder to start from; null: at random"
    )
    weights_except: tuple[str, ...] = Field(
        (), description="names or patterns of weights that stay random"
    )
    weights_sha256: str | None = Field(
        None, description="SHA-256 of the file of weights, which must then match"
    )
    classes: Annotated[Whole, Field(ge=1, le=10_000_000)] | None = Field(
        None, description="outputs of a classifier; null: the classes of the data"
    )
    optimizer: tuple[Literal[tuple(OPTIMIZERS)], ...] = Field(  # type: ignore[valid-type]
        ("thor-muon",),
        description="optimizers to train with, one after the other",
    )
    optimizers: dict[str, dict[str, Any]] = Field(
        {}, description="settings of those in use, where given"
    )
    targets: tuple[Positive, ...] = Field(
        (), description="values of the primary metric; the table says when reached"
    )
    checkpoint_interval: Count | None = Field(
        None, description="steps between checkpoints; null: an epoch"
    )
    keep_checkpoints: Annotated[Whole, Field(ge=0)] = Field(
        2, description="newest checkpoints that are kept; 0: none is made"
    )
    keep_best: bool = Field(True, description="keep the checkpoint of the best evaluation too")
    log_interval: Count | None = Field(
        100, description="steps between printed lines; null: evaluations only"
    )
    threads: Annotated[Whole, Field(ge=1, le=4096)] | None = Field(
        None, description="CPU threads; null: torch's choice"
    )

    @field_validator("optimizers", mode="before")
    @classmethod
    def _of_those_in_use(cls, given: Any, info: ValidationInfo) -> Any:
        checked, used = Settings.model_validate(given), info.data.get("optimizer", ())
        return {
            name: {key: getattr(getattr(checked, name), key) for key in given[name]}
            for name in used
            if name in given
        }

    def rules(self) -> Rules:
        """Refuse settings of weights without weights, and what cannot be divided."""
        return (
            *super().rules(),
            (
                len(set(self.optimizer)) != max(1, len(self.optimizer)),
                f"optimizer={list(self.optimizer)} must name one or more optimizers, each once",
            ),
            (
                self.weights is None
                and (self.weights_sha256 is not None or self.weights_except != ()),
                "weights is not set, but weights_except or weights_sha256 is: give weights=FILE, "
                "or leave them out",
            ),
            (
                self.parallel != "ddp" and "muon" in self.optimizer,
                f"parallel={self.parallel}: muon orthogonalises whole matrices; use parallel=ddp "
                "or thor-muon",
            ),
            (
                self.parallel != "ddp"
                and any(given.get("split_dim") == AUTO for given in self.optimizers.values()),
                f"parallel={self.parallel}: split_dim=auto measures whole factors; give a number",
            ),
        )
