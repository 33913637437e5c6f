"""A narrow ResNet-18 on a quarter of CIFAR-10, 20 epochs: when THOR is where tuned SGD ends.

    python -m benchmarks resnet18            # runs what is missing, then tables and picture
    python -m benchmarks resnet18 --table

The network is the ResNet-18 of He et al. 2016 at an eighth of its width, so that 24 trainings fit
in an evening of two cores: stages of 8, 16, 32 and 64, two blocks each, behind a stem of 3 x 3
filters without pooling. Augmentation is that of their section 4.2: four pixels of padding, crops
and flips. Every fourth image of CIFAR-10 trains, in batches of 128 or 1,024. The data come from
build/cifar10 (gpu_cifar10.py says of what); each row says whether they are the originals or JPEG
copies.

- SGD has their momentum of 0.9 and weight decay of 1e-4. `thor` is THOR with its defaults,
  `thor-paper` its step without a bound (``THOR.preset("paper")``). ThorMuon has no option.
- The first three have five trials for each batch: three learning rates a factor of two apart, then
  two more beyond the end that the best is nearer to; for the paper's step the last two are other
  dampings with the best of three rates. Trials take 5 epochs, have a seed that serves nothing
  else, and choose by 5,000 images that neither train nor test.
- The rates, whatever they are, grow over the first 5 % of the steps, then fall linearly to 0.

Accuracies are those of the 10,000 test images after each epoch. Everything runs on a GPU where
there is one, or else on one thread, in float32. Seconds are steps times the time of a step, which
all optimizers take in turns (jobs named `alone`), relative to SGD's; evaluations do not count,
refreshes count where they happen.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_cifar10 import load
from benchmarks.runner.drawing import Contestant, save_contests
from benchmarks.runner.machine import DEVICE, keep_freed_memory
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.numbers import mean_curve, shares_until
from benchmarks.runner.stores import key_of
from benchmarks.runner.timing import RATE, seconds_at, time_optimizers
from benchmarks.runner.trials import best_of, rates_around, shown
from torch_thor import THOR, ThorMuon
from torch_thor.training.models.small import BasicBlock

DATA = Path("build/cifar10")
TRAIN, CHOOSE = slice(0, None, 4), slice(1, None, 10)  # of the 50,000: no image is in both
BATCHES = (128, 1024)
EPOCHS, TRIAL_EPOCHS = 20, 5
WARM_UP = 0.05  # of the steps
HELD_OUT_BATCH = 250
TUNING_SEED, SEEDS = 10, (0, 1, 2)
TRIALS = 5
TUNED = {"sgd": 0.1, "thor": 0.1, "thor-paper": 0.05}  # the middle of the first learning rates
DAMPINGS = (0.1, 0.3)  # of the paper's step, beside the default of 0.03
NAMES = {
    "sgd": "SGD, tuned", "thor": "THOR, lr tuned", "thor-paper": "the paper's step, tuned",
    "thor-muon": "ThorMuon",
}  # fmt: skip
COLOURS = {  # of Okabe and Ito
    "sgd": "#999999", "thor": "#009e73", "thor-paper": "#d55e00", "thor-muon": "#0072b2",
}  # fmt: skip
SPANS = 5  # of ten rounds
PICTURE = Path("docs/images/resnet18.png")

Job = dict[str, Any]
Row = dict[str, Any]
Rows = Mapping[str, Row]
Split = tuple[Tensor, Tensor]  # images (count, 3, 32, 32), and labels


# ---- network and data ----------------------------------------------------------------------------


def resnet18() -> nn.Module:
    """Return the network, with the initial weights of He et al. 2015."""
    widths = [8, 8, 8, 16, 16, 32, 32, 64, 64]
    blocks = [BasicBlock(i, o, 1 if i == o else 2) for i, o in itertools.pairwise(widths)]
    stem = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = nn.Sequential(*stem, *blocks, *head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model.to(DEVICE).to(memory_format=torch.channels_last)


@cache
def data() -> tuple[str, Split, Split, Split]:
    """Return what the data are, and images to train, to choose by and to test, read once."""
    words, train, test = load(DATA)
    pixels = train[0][TRAIN].double() / 255
    mean, deviation = pixels.mean((0, 1, 2)).float(), pixels.std((0, 1, 2)).float()

    def normalised(split: Split, which: slice) -> Split:
        images = (split[0][which].float() / 255 - mean) / deviation
        return images.permute(0, 3, 1, 2).to(DEVICE), split[1][which].to(DEVICE)

    return words, normalised(train, TRAIN), normalised(train, CHOOSE), normalised(test, slice(None))


def epoch(split: Split, size: int, generator: torch.Generator) -> Iterator[Split]:
    """Yield the whole batches of an epoch, cropped and flipped."""
    images, labels = split
    order = torch.randperm(len(images), generator=generator)
    for start in range(0, len(images) - size + 1, size):
        chosen = order[start : start + size].to(images.device)
        yield augmented(images[chosen], generator), labels[chosen]


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image moved by up to four pixels, zeros beyond its edges, perhaps mirrored."""
    count, channels, height, width = images.shape
    padded = functional.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(9, (2, count, 1), generator=generator)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    number = torch.arange(count).view(-1, 1, 1, 1)
    channel = torch.arange(channels).view(1, -1, 1, 1)
    places = (number, channel, rows[:, None, :, None], columns[:, None, None, :])
    moved = padded[tuple(place.to(images.device) for place in places)]
    return moved.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """Return the share of images that are classified right."""
    model.eval()
    parts = zip(*(part.split(HELD_OUT_BATCH) for part in split), strict=True)
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in parts)
    model.train()
    return right / len(split[1])


# ---- one run -------------------------------------------------------------------------------------


def run(job: Job) -> dict[str, Any]:
    """Train once, or time the steps of all."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return {"data": data()[0], **(time_steps(job) if job.get("alone") else train(job))}


def make(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """Return the optimizer of a job."""
    name = job["optimizer"]
    if name == "thor-muon":
        return ThorMuon(model)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=job["lr"], momentum=0.9, weight_decay=1e-4)
    if name == "thor":
        return THOR(model, lr=job["lr"])
    options = {key: job[key] for key in ("lr", "damping") if key in job}
    return THOR(model, **THOR.preset("paper"), **options)


def train(job: Job) -> dict[str, Any]:
    """Train, with an evaluation after each epoch: step, accuracy, refreshes so far.

    A trial is evaluated at its end, by the images that choose.
    """
    _, split, choosing, test = data()
    is_trial = job["seed"] == TUNING_SEED
    torch.manual_seed(job["seed"])
    model = resnet18()
    optimizer = make(model, job)
    largest = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(job["seed"])
    epochs = TRIAL_EPOCHS if is_trial else EPOCHS
    steps = epochs * (len(split[1]) // job["batch"])
    curve, step, refreshes = [(0, accuracy(model, test), 0)] if not is_trial else [], 0, 0
    for turn in range(1, epochs + 1):
        for batch in epoch(split, job["batch"], generator):
            for group, lr in zip(optimizer.param_groups, largest, strict=True):
                group["lr"] = lr * share(step, steps)
            failure = take_step(model, optimizer, batch)
            step += 1
            if failure:
                return {"value": None, "failure": f"{failure} in step {step}"}
            refreshes += bool(getattr(optimizer, "last_refresh", ()))
        if turn == epochs or not is_trial:
            curve.append((step, accuracy(model, choosing if is_trial else test), refreshes))
    return {"value": curve[-1][1], "curve": curve}


def share(step: int, steps: int) -> float:
    """Return the learning rate of a step, from 0, as a share of the largest."""
    return min(1.0, (step + 1) / (WARM_UP * steps), (steps - step) / ((1 - WARM_UP) * steps))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Split) -> str:
    """Train on a batch, and return why it cannot, or nothing."""
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    if not math.isfinite(loss.item()):
        return f"loss {loss.item()}"
    loss.backward()
    try:
        optimizer.step()
    except FloatingPointError as error:  # THOR refuses gradients that are not finite
        return str(error)
    optimizer.zero_grad()
    return ""


def time_steps(job: Job) -> dict[str, Any]:
    """Time the steps of all in turns, with one size of the batch."""
    split, generator = data()[1], torch.Generator().manual_seed(0)
    endless = itertools.chain.from_iterable(
        epoch(split, job["batch"], generator) for _ in itertools.count()
    )
    makers = {name: partial(made, name) for name in NAMES}
    return time_optimizers(makers, take_step, partial(next, endless), SPANS)


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network and an optimizer, whose learning rate serves nothing."""
    model = resnet18()
    return model, make(model, {"optimizer": name, "lr": RATE})


def optimizers(job: Job) -> list[str]:
    """Name ours among those that a job trains with or times."""
    if job.get("alone"):
        return ["THOR", "ThorMuon"]
    return {"sgd": [], "thor-muon": ["ThorMuon"]}.get(job["optimizer"], ["THOR"])


# ---- what is run ---------------------------------------------------------------------------------


def jobs(rows: Rows) -> list[Job]:
    """List the jobs that are known: which come next depends on what was best so far."""
    found = []
    for batch in BATCHES:
        found += confirm(ours(batch))
        found += [job for name in TUNED for job in tuning(rows, batch, name)]
        for setting in chosen(rows, batch).values():
            found += confirm(setting)
        found.append(timing(batch))
    return found


def ours(batch: int) -> Job:
    """Return ThorMuon's setting, which says nothing."""
    return {"optimizer": "thor-muon", "batch": batch}


def timing(batch: int) -> Job:
    """Return the job that times the steps."""
    return {"alone": True, "batch": batch}


def confirm(setting: Job) -> list[Job]:
    """Return the runs of a setting with the seeds that count."""
    return [{**setting, "seed": seed} for seed in SEEDS]


def tuning(rows: Rows, batch: int, name: str) -> list[Job]:
    """Return the trials of an optimizer, as far as they are known."""
    setting = {"optimizer": name, "batch": batch, "seed": TUNING_SEED}
    rates = TRIALS - len(DAMPINGS) if name == "thor-paper" else TRIALS
    tried = rates_around(rows, setting, TUNED[name], count=rates, higher=True)
    if name != "thor-paper":
        return tried
    best = best_of(rows, tried, count=rates, higher=True)
    if best is None:
        return tried
    return tried + [{**best, "damping": damping, "seed": TUNING_SEED} for damping in DAMPINGS]


def chosen(rows: Rows, batch: int) -> dict[str, Job]:
    """Return the best setting of each optimizer whose trials are there."""
    best = {
        name: best_of(rows, tuning(rows, batch, name), count=TRIALS, higher=True) for name in TUNED
    }
    return {name: setting for name, setting in best.items() if setting is not None}


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of ThorMuon, and of those that are tuned, with the larger batch."""
    batch = BATCHES[-1]
    settings = [ours(batch), *chosen(rows, batch).values()]
    return [{**setting, "seed": SEEDS[0]} for setting in settings]


def tolerance(rows: Rows, job: Job) -> float:
    """Return how far an accuracy may differ on another machine."""
    return 0.02


# ---- what is shown -------------------------------------------------------------------------------


def contestants(rows: Rows, batch: int) -> dict[str, Job]:
    """Return those that have run with all their seeds, by name."""
    settings = {**chosen(rows, batch), "thor-muon": ours(batch)}
    return {
        name: setting
        for name, setting in settings.items()
        if all(key_of(job) in rows for job in confirm(setting))
    }


def diverged(rows: Rows, setting: Job) -> int:
    """Return how many seeds diverged."""
    return sum(rows[key_of(job)]["value"] is None for job in confirm(setting))


def curves(rows: Rows, setting: Job) -> list[list[Sequence[float]]]:
    """Return the curves of all seeds."""
    return [rows[key_of(job)]["curve"] for job in confirm(setting)]


def seconds(rows: Rows, setting: Job) -> list[float]:
    """Return the seconds of training up to each evaluation; none before steps are timed."""
    times = rows.get(key_of(timing(setting["batch"])))
    if times is None:
        return []
    return seconds_at(times, setting["optimizer"], "sgd", curves(rows, setting)[0])


def table(rows: Rows) -> str:
    """Return where each ends and when it is where SGD ends, then the trials."""
    heads = ["batch", "optimizer", "learning rate / damping", "accuracy at the end"]
    heads += ["there at SGD's end after: steps", "seconds", "bytes a parameter", "data"]
    lines = [line for batch in BATCHES for line in ends(rows, batch)]
    tried = [
        [str(batch), NAMES[name], shown(rows, tuning(rows, batch, name), ("lr", "damping"))]
        for batch in BATCHES
        for name in TUNED
    ]
    trials = markdown(["batch", "tuned", "learning rate / damping: accuracy of the trial"], tried)
    return "\n\n".join([markdown(heads, lines), trials])


def ends(rows: Rows, batch: int) -> list[list[str]]:
    """Return the cells of each contestant with one size of the batch."""
    found, times = contestants(rows, batch), rows.get(key_of(timing(batch)))
    lines = []
    for name, setting in found.items():
        tuned = [f"{setting[key]:g}" for key in ("lr", "damping") if key in setting]
        options = " / ".join(tuned) or "none given"
        size = "" if times is None else f"{times['state_bytes'][name]:.1f}"
        words = rows[key_of(confirm(setting)[0])]["data"]
        results = outcome(rows, found.get("sgd"), setting)
        lines.append([str(batch), NAMES[name], options, *results, size, words])
    return lines


def outcome(rows: Rows, sgd: Job | None, setting: Job) -> list[str]:
    """Return where one ends, and the shares of SGD's steps and seconds until it is there."""
    lost = diverged(rows, setting)
    if lost:
        return [f"{lost} of {len(SEEDS)} seeds diverged", "not reached", "not reached"]
    end = with_error([curve[-1][1] for curve in curves(rows, setting)])
    if sgd is None or diverged(rows, sgd):
        return [end, "", ""]
    return [end, *reached(rows, sgd, setting)]


def reached(rows: Rows, sgd: Job, setting: Job) -> list[str]:
    """Return the shares of SGD's steps and seconds after which one is where SGD ends."""
    goal = statistics.fmean(curve[-1][1] for curve in curves(rows, sgd))
    own = mean_curve(curves(rows, setting))
    return shares_until(own, goal, seconds(rows, setting), seconds(rows, sgd))


def draw(rows: Rows) -> None:
    """Draw the accuracies against steps and seconds, a row for each size of the batch."""
    contests = {
        f"test accuracy, batches of {batch:,}": [
            drawn(rows, name, setting)
            for name, setting in contestants(rows, batch).items()
            if not diverged(rows, setting)
        ]
        for batch in BATCHES
        if key_of(timing(batch)) in rows
    }
    save_contests(contests, PICTURE)


def drawn(rows: Rows, name: str, setting: Job) -> Contestant:
    """Return what is drawn of an optimizer."""
    return Contestant.of_curves(
        NAMES[name], COLOURS[name], curves(rows, setting), seconds(rows, setting)
    )
