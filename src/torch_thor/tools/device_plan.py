"""`torch-thor plan`: what an optimizer keeps and sends, and how long a training takes.

It tells so before many devices are rented.

Bytes are exact. Times are those of a step that is measured on one device, plus the network: a
collective of p devices is a ring, which takes rounds · latency + sent bytes / bandwidth, with p - 1
rounds, or 2 (p - 1) for an all-reduce. Nothing overlaps, all layers take new factors on each
refresh, and a device inverts its share of the blocks.
"""

import json
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_thor import __version__
from torch_thor.errors import explaining, first_line, require
from torch_thor.files import check_place, write_text, writing
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.registry import WITH_CURVATURE
from torch_thor.printing import columns, printer, quantity
from torch_thor.split import device_name, inverse_seconds, loss_of
from torch_thor.tools import traffic
from torch_thor.tools.split_dim import CHANNELS, CLASSES, Subject, load_subject, require_at_least
from torch_thor.training.models import bert
from torch_thor.training.models.library import build_model
from torch_thor.training.optimizers import AUTO, build_optimizer
from torch_thor.training.parallel import device_of
from torch_thor.training.precision import Precision
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.recipes import is_file_name, load_recipe, recipe_names

FILE, ROUNDS = "plan.json", 5
KINDS, FORMS = tuple(WITH_CURVATURE), ("ddp", "fsdp", "hsdp")
PIXELS, LENGTH, VOCABULARY = 224, 128, 30522  # of ImageNet and of BERT, where no recipe says others
OF_DATA = {"digits": 10, "fashion-mnist": 10, "cifar10": 10, "cifar100": 100}  # classes
# minutes by devices (Ascend 910) for about 40 epochs of ResNet-50 on ImageNet (Chen et al. 2021)
PAPER_MODEL, PAPER = "resnet50", {8: 66.7, 128: 4.1, 256: 2.7}
PAPER_WORDS = (
    "Chen et al. 2021: about 40 epochs on Ascend 910, with a batch that grows with the devices too"
)
COLUMNS = (
    "in all: weights, gradients, moments, factors and inverses (and sums, on refreshes alone) of "
    "the device that keeps most; sent: by it in a step, and in addition on a refresh; work: how "
    "much longer than the mean it inverts"
)
OF_COPIES = (
    "hsdp: of the devices that hold the same rows, the first inverts their blocks and sends them "
    "to the others, so the inversion takes as long as on --shards devices, whatever the number of "
    "copies. Dealt out over the copies as well, the blocks would be sent as often, and a refresh "
    "would be shorter by {:.1%} of the inversion of all blocks on one device{}"
)
MOST_DEVICES = 10**6
SIZES = ("", "devices", "in all", "factors", "sums", "sent, step", "+ refresh", "work")
TIMES = ("", "devices", "batch", "step, ms", "network", "refresh", "all, min", "paper, min")


@dataclass(frozen=True)
class Measured:
    """Seconds on one device of an ordinary step, a refresh step, and inverting all its blocks."""

    device: str
    batch: int
    ordinary: float
    refresh: float
    inverting: float


@dataclass(frozen=True)
class Row:
    """What the device that has most keeps, sends and computes, in bytes."""

    form: str
    devices: int
    memory: traffic.Memory
    sent: int  # in every step
    sent_more: int  # in addition on a refresh
    rounds: int
    rounds_more: int
    most_work: float  # of the inversion, over the mean

    def seconds(
        self, measured: Measured, bandwidth: float, latency: float
    ) -> tuple[float, float, float]:
        """Return the times of a step, of its network part, and of a step with a refresh."""
        network = self.rounds * latency + self.sent / bandwidth
        more = self.rounds_more * latency + self.sent_more / bandwidth
        # The measured refresh contains what other devices will invert.
        others = measured.inverting * (1 - self.most_work / self.devices)
        return measured.ordinary + network, network, measured.refresh - others + network + more

    @property
    def waiting(self) -> float:
        """The share of all inversions that a refresh takes longer than if all had the same work."""
        return (self.most_work - 1) / self.devices


def plan(
    subject: str,
    console: Console,
    *,
    words: Sequence[str] = (),
    devices: Sequence[int] = (1, 8, 64, 256),
    shards: int = 8,
    optimizer: str | None = None,
    split_dim: int | None = None,
    batch: int | None = None,
    samples: int | None = None,
    bandwidth: float = 50.0,
    latency: float = 14.0,
    device: str = "auto",
    out: Path | None = None,
) -> list[Row]:
    """Print and return a row for each way and number of devices, as `torch-thor plan` does."""
    require_at_least(1, devices=min(devices), batch=batch, samples=samples)
    require(
        max(devices) <= MOST_DEVICES,
        f"--devices {max(devices)}: must be at most {MOST_DEVICES:,}, of which each has a row of "
        "numbers here; give fewer",
    )
    require_at_least(2, shards=shards)
    require(
        bandwidth > 0 <= latency,
        f"--bandwidth {bandwidth} must be above 0, --latency {latency} at least 0",
    )
    if out is not None:
        check_place(out)
    is_recipe = subject in recipe_names() or is_file_name(subject)
    require(is_recipe or not words, f"{subject} is no recipe: leave {' '.join(words)} out")
    recipe = load_recipe(subject, words) if is_recipe else None
    name, given = _chosen(recipe, optimizer, split_dim)
    with torch.device("meta"):
        model = subject_of(subject, recipe, batch or 1).model
    require(
        any(p.requires_grad for p in model.parameters()),
        f"{subject} has no parameters to train: unfreeze some",
    )
    thor, say = _optimizer(name, model, given), printer(console)
    rows = [
        row for form in FORMS for number in devices for row in rows_of(thor, form, number, shards)
    ]
    trained = quantity(sum(p.numel() for p in model.parameters() if p.requires_grad))
    say(
        f"{subject}, {name}: {len(thor.curvature)} preconditioned layers, {trained} trained "
        "parameters"
    )
    console.print(
        columns(
            "MB that a device keeps and sends; the most work of one over the mean",
            SIZES,
            map(_sizes, rows),
        )
    )
    say(COLUMNS)
    measured, times = None, {row: dict[str, float]() for row in rows}
    if batch is not None:
        say(f"Measuring a step on {device_of(device)} ...")
        measured = measure(subject, recipe, name, given, device_of(device), batch)
        interval = thor.param_groups[0]["update_interval"]
        links = 1e9 * bandwidth, 1e-6 * latency
        times = {row: _seconds(row, measured, links, interval, samples) for row in rows}
        paper = PAPER if (recipe.model if recipe else subject) == PAPER_MODEL else {}
        cells = [_times(row, seconds, measured.batch, paper) for row, seconds in times.items()]
        console.print(columns("Predicted times", TIMES, cells))
        say(
            f"Predicted from a step on {measured.device}, with {bandwidth:g} GB/s and "
            f"{latency:g} µs; nothing overlaps"
        )
        if paper:
            say(PAPER_WORDS)
    for line in _about_copies(rows, measured):
        say(line)
    if out is not None:
        content = {
            "model": subject,
            "optimizer": name,
            "torch_thor": __version__,
            "network": {"bandwidth": bandwidth, "latency": latency, "shards": shards},
            "measured": measured and asdict(measured),
            "rows": [{**asdict(row), "seconds": seconds} for row, seconds in times.items()],
        }
        with writing(out, "choose another folder with --out"):
            out.mkdir(parents=True, exist_ok=True)
            write_text(out / FILE, json.dumps(content, indent=1) + "\n")
        say(f"Numbers are in {out}")
    return rows


def _about_copies(rows: Sequence[Row], measured: Measured | None) -> list[str]:
    """Return why a device of HSDP has more work than the mean, if one has."""
    longest = max((row.waiting for row in rows if row.form == "hsdp"), default=0.0)
    saved = f" ({1000 * longest * measured.inverting:.2g} ms)" if measured else ""
    return [OF_COPIES.format(longest, saved)] if longest else []


def _chosen(
    recipe: Recipe | None, optimizer: str | None, split_dim: int | None
) -> tuple[str, dict[str, Any]]:
    """Return the name of the optimizer to plan for, and its options."""
    used = [name for name in (recipe.optimizer if recipe else KINDS) if name in KINDS]
    name = optimizer or next(iter(used), "none")
    require(
        name in KINDS,
        f"--optimizer {name}: only {' and '.join(KINDS)} have curvature to plan for; give one",
    )
    given = dict(recipe.optimizers.get(name, {})) if recipe else {}
    given |= {} if split_dim is None else {"split_dim": split_dim}
    require(
        given.get("split_dim") != AUTO,
        "split_dim=auto is measured by a training: give --split-dim, such as 128",
    )
    return name, given


def _seconds(
    row: Row,
    measured: Measured,
    links: tuple[float, float],
    interval: Any,
    samples: int | None,
) -> dict[str, float]:
    """Name the times of a row; that of a training is among them if its samples are given."""
    step, network, refresh = row.seconds(measured, *links)
    times = {"step": step, "network": network, "refresh": refresh}
    if samples is not None:
        steps = -(-samples // (measured.batch * row.devices))
        refreshes = _refreshes(interval, steps)
        times["training"] = refreshes * refresh + (steps - refreshes) * step
    return times


def rows_of(optimizer: CurvatureOptimizer, form: str, devices: int, shards: int) -> list[Row]:
    """Return the row of a number of devices; none for what cannot be divided among them."""
    if (form == "hsdp" and (devices <= shards or devices % shards)) or (
        form != "ddp" and devices == 1
    ):
        return []
    parts = {"fsdp": devices, "hsdp": shards}.get(form, 1)
    model = optimizer.model
    layers = traffic.laid_out(optimizer.curvature.values(), devices, shards=parts)
    step = traffic.collectives_of_training(model, devices, parts)
    more = traffic.collectives_of_refresh(layers, devices)
    memory = traffic.memory_of(optimizer, layers, parts)
    work = traffic.most_work(layers, devices)
    sent, sent_more = (sum(collective.sent for collective in part) for part in (step, more))
    rounds, rounds_more = (sum(collective.rounds for collective in part) for part in (step, more))
    return [Row(form, devices, memory, sent, sent_more, rounds, rounds_more, work)]


def _refreshes(interval: Any, steps: int) -> int:
    step = count = 0
    while step < steps:
        step, count = step + (interval if isinstance(interval, int) else interval(step)), count + 1
    return count


def _masked_loss(output: Any, targets: tuple[Tensor, Tensor]) -> Tensor:
    pairs = getattr(output, "seq_relationship_logits", None)
    loss = cross_entropy(output.logits if pairs is None else output.prediction_logits, targets[0])
    return loss if pairs is None else loss + cross_entropy(pairs, targets[1])


def subject_of(word: str, recipe: Recipe | None, count: int) -> Subject:
    """Build a network, its loss, and a random batch, because times do not depend on the values."""
    torch.manual_seed(0)
    name, shape, classes, length, pairs = word, (CHANNELS, PIXELS, PIXELS), CLASSES, LENGTH, True
    if recipe is not None:
        known = ("image-classification", "masked-lm")
        require(
            recipe.task in known,
            f"task={recipe.task}: plans are for {' and '.join(known)}; choose another recipe",
        )
        name, shape, text = recipe.model, recipe.data.image_shape, recipe.data.text
        classes = recipe.classes or OF_DATA.get(recipe.data.name, CLASSES)
        length, pairs = text.length, text.next_sentence
    if bert.is_known(name):
        network: Any = bert.build(name, VOCABULARY, length, pad=0, next_sentence=pairs)
        # Which tokens are scored makes no difference to the times.
        masked = max(1, round(0.15 * length)) * count
        network.get_output_embeddings().register_forward_pre_hook(
            lambda _, given: (given[0].flatten(0, 1)[:masked],)
        )
        targets = torch.randint(VOCABULARY, (masked,)), torch.randint(2, (count,))
        return Subject(
            network,
            ({"input_ids": torch.randint(5, VOCABULARY, (count, length))}, targets),
            _masked_loss,
        )
    subject = (
        load_subject(name, 0) if recipe is None else Subject(build_model(name, shape[0], classes))
    )
    if subject.batch is None and ".py:" not in name:
        subject = subject._replace(
            batch=(torch.randn(count, *shape), torch.randint(classes, (count,)))
        )
    return subject


def _optimizer(name: str, model: nn.Module, given: Mapping[str, Any]) -> CurvatureOptimizer:
    with warnings.catch_warnings():
        # The warning is that little is preconditioned, and a line tells how many layers.
        warnings.simplefilter("ignore", UserWarning)
        return build_optimizer(name, model, given)  # type: ignore[return-value]


def measure(
    subject: str,
    recipe: Recipe | None,
    name: str,
    given: Mapping[str, Any],
    device: torch.device,
    batch: int,
) -> Measured:
    """Measure ordinary steps and refreshes in turn, and the inversion of all blocks."""
    model, sample, loss_fn = subject_of(subject, recipe, batch)
    require(
        sample is not None,
        f"{subject} returned a model alone, and its times are to be measured: return (model, "
        "(inputs, targets)) or (model, (inputs, targets), loss function)",
    )
    precision = Precision("fp32" if recipe is None else recipe.precision, None, device)
    given = {key: value for key, value in given.items() if key != "fisher"} | {
        "lr": 1e-6,
        "update_interval": 2,
    }
    seconds: tuple[list[float], list[float]] = [], []
    with explaining(
        (RuntimeError, ValueError, TypeError, AttributeError),
        lambda error: (
            f"{subject} could not be measured ({first_line(error)}): try another --batch or "
            "--device"
        ),
    ):
        optimizer = _optimizer(name, model.to(device), given)
        optimizer.grad_scaler = precision.scaler
        for group in optimizer.param_groups:  # every refresh of THOR takes new factors
            if "trace_thresholds" in group:
                group["trace_thresholds"] = (0.0, 0.0)
        for turn in range(2 * ROUNDS + 2):
            started = time.perf_counter()
            with precision.autocast():
                loss = loss_of(model, sample, loss_fn, device)
            precision.backward(loss)
            precision.step(optimizer)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            seconds[turn % 2].append(time.perf_counter() - started)
            optimizer.zero_grad()
        blocks = traffic.blocks_of(optimizer.curvature.values())
        # A block of one number is inverted by a division, which takes no time.
        sizes = [run.shape for run in blocks if run.shape[1] > 1]
        largest = max(run.shape[1] for run in blocks)
        (inverting,) = inverse_seconds(sizes, (largest,), dtype=blocks[0].dtype, device=device)
    # The first step of each kind is a warm-up.
    refresh, ordinary = (statistics.median(times[1:]) for times in seconds)
    if ".py:" in subject:
        inputs = sample[0] if isinstance(sample, tuple | list) else sample
        batch = len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)
    return Measured(
        device_name(device), batch, ordinary, refresh, min(inverting, max(0.0, refresh - ordinary))
    )


def _sizes(row: Row) -> list[str]:
    sizes = (row.memory.whole, row.memory.curvature, row.memory.sums, row.sent, row.sent_more)
    shown = (f"{size / 1e6:,.1f}" for size in sizes)
    return [row.form, f"{row.devices:,}", *shown, f"{row.most_work:.2f}"]


def _times(
    row: Row, seconds: Mapping[str, float], batch: int, paper: Mapping[int, float]
) -> list[str]:
    steps = (f"{1000 * seconds[key]:,.1f}" for key in ("step", "network", "refresh"))
    training = f"{seconds['training'] / 60:,.1f}" if "training" in seconds else ""
    of_row = row.form, f"{row.devices:,}", f"{batch * row.devices:,}"
    return [*of_row, *steps, training, str(paper.get(row.devices, ""))]
