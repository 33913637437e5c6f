"""CIFAR-10 with airbench94: its own Muon and SGD untouched, and ThorMuon in their place.

    python -m benchmarks cifar10            # runs what is missing, then table and picture
    python -m benchmarks cifar10 --table

airbench94_muon.py of KellerJordan/cifar10-airbench is read from build/airbench and run as it is, at
its full width and batch: network, augmentation, schedule and evaluation are its own, and
gpu_airbench.py says what is replaced. The data come from build/cifar10 (gpu_cifar10.py says of
what); each row says whether they are the originals or JPEG copies, and on which device it ran. With
a GPU the weights are float16, as its own; without one they are float32, because a CPU takes minutes
for a step in float16, nothing is compiled, and a training of 8 epochs takes an hour of one core.

Accuracies are with test-time augmentation at the end, and without it after each epoch. Seconds are
those of airbench94's clock, which leaves evaluations out. They are of the machine as it was during
the run; run with `--workers 1`, and compare those of one device alone.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_airbench import FILTERS, FLOAT, OWN, THOR_MUON, Study, save, without_a_gpu
from benchmarks.gpu_cifar10 import load
from benchmarks.runner.drawing import Contestant, save_contests
from benchmarks.runner.machine import DEVICE, keep_freed_memory
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.stores import key_of
from torch_thor.errors import require

CODE, DATA = Path("build/airbench/airbench94_muon.py"), Path("build/cifar10")
NAMES = {2: (OWN, THOR_MUON), 4: (OWN, THOR_MUON), 8: (OWN, THOR_MUON, FILTERS)}  # by epochs
SEEDS = (0, 1, 2)
CHANGES = FLOAT  # on a CPU
STEPS = 25  # of an epoch
COLOURS = {OWN: "#d55e00", THOR_MUON: "#0072b2", FILTERS: "#009e73"}  # of Okabe and Ito
PICTURE = Path("docs/images/cifar10.png")
STRIDE = 1  # between the images that are taken; more makes a run small

Job = dict[str, Any]
Row = dict[str, Any]
Rows = Mapping[str, Row]


def jobs(rows: Rows) -> list[Job]:
    """List the trainings, the shortest first; those of a seed follow each other."""
    return [
        {"optimizer": name, "epochs": epochs, "seed": seed}
        for epochs, names in NAMES.items()
        for seed in SEEDS
        for name in names
    ]


def run(job: Job) -> dict[str, Any]:
    """Train once."""
    require(CODE.is_file(), f"{CODE} is missing: save it from KellerJordan/cifar10-airbench there")
    on_a_cpu = DEVICE.type == "cpu"
    if on_a_cpu:
        torch.set_num_threads(1)
        keep_freed_memory()
    words, *splits = load(DATA)
    splits = [(images[::STRIDE], labels[::STRIDE]) for images, labels in splits]
    with (
        tempfile.TemporaryDirectory() as folder,
        without_a_gpu() if on_a_cpu else contextlib.nullcontext(),
        contextlib.redirect_stdout(None),  # airbench94 prints a table
    ):
        save(splits, Path(folder))
        study = Study(CODE, Path(folder), DEVICE, CHANGES if on_a_cpu else {})
        if not on_a_cpu:  # the network is compiled in a first training, whose labels are random
            study.train(job["optimizer"], job["epochs"], "warmup")
        found = study.train(job["optimizer"], job["epochs"], job["seed"])
    return {"value": found["tta_val_acc"], "data": words, **found}


def optimizers(job: Job) -> list[str]:
    """Name ours among those that a job trains with."""
    return [] if job["optimizer"] == OWN else ["ThorMuon"]


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of the row that README shows, and of the shortest trainings before it."""
    return [
        {"optimizer": name, "epochs": epochs, "seed": SEEDS[0]}
        for epochs in (min(NAMES), max(NAMES))
        for name in (OWN, THOR_MUON)
    ]


def tolerance(rows: Rows, job: Job) -> float:
    """Return how far an accuracy may differ on another machine."""
    return 0.01


def table(rows: Rows) -> str:
    """Return a line for each optimizer and number of epochs, the longest first."""
    lines = []
    for epochs, names in sorted(NAMES.items(), reverse=True):
        for name in names:
            own = ran(rows, name, epochs)
            if own:
                lines.append([str(epochs), name, *cells(own)])
    heads = ("epochs", "optimizer", "seeds", "accuracy after each", "at the end", "seconds")
    return markdown((*heads, "data", "device"), lines)


def ran(rows: Rows, name: str, epochs: int) -> list[Row]:
    """Return the rows of the seeds that have run."""
    asked = [{"optimizer": name, "epochs": epochs, "seed": seed} for seed in SEEDS]
    return [rows[key_of(job)] for job in asked if key_of(job) in rows]


def draw(rows: Rows) -> None:
    """Draw the accuracies after each epoch, in rows of as many epochs as are trained."""
    devices = {row["device"] for row in rows.values()}
    if len(devices) == 1:  # seconds of several have no axis
        contests = {
            f"test accuracy, {epochs} epochs": [
                drawn(name, epochs, own) for name in names if (own := ran(rows, name, epochs))
            ]
            for epochs, names in sorted(NAMES.items(), reverse=True)
            if epochs > 2  # two points are no curve
        }
        save_contests(contests, PICTURE, device=devices.pop())


def drawn(name: str, epochs: int, own: list[Row]) -> Contestant:
    """Return what is drawn of an optimizer: all epochs take equally long."""
    seconds = statistics.fmean(row["train_seconds"] for row in own) / epochs
    ends = range(1, epochs + 1)
    return Contestant(
        name,
        COLOURS[name],
        [STEPS * end for end in ends],
        [seconds * end for end in ends],
        [row["val_acc"] for row in own],
    )


def cells(own: list[Row]) -> list[str]:
    """Return what several seeds of one training show."""
    after = [statistics.fmean(values) for values in zip(*(r["val_acc"] for r in own), strict=True)]
    last = [row["value"] for row in own]
    devices = {row["device"] for row in own}
    seconds = statistics.fmean(row["train_seconds"] for row in own)
    return [
        str(len(own)),
        ", ".join(f"{value:.3f}".lstrip("0") for value in after),
        with_error(last) if len(last) > 1 else f"{last[0]:.4f}",
        f"{seconds:.2f}" if len(devices) == 1 else "",
        ", ".join(sorted({row["data"] for row in own})),
        ", ".join(sorted(devices)),
    ]
