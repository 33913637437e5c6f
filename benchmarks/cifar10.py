"""CIFAR-10 with airbench94 on a CPU: its own Muon and SGD untouched, and ThorMuon in their place.

    python -m benchmarks cifar10            # runs what is missing, then the table
    python -m benchmarks cifar10 --table

airbench94_muon.py of KellerJordan/cifar10-airbench is read from build/airbench and run as it is, at
its full width and batch: network, augmentation, schedule and evaluation are its own, and
gpu_airbench.py says what is replaced. Here the weights are float32, because a CPU takes minutes for
a step in float16, and nothing is compiled. The data come from build/cifar10 (gpu_cifar10.py says of
what); each row says whether they are the originals or JPEG copies.

Accuracies are with test-time augmentation at the end, and without it after each epoch. Seconds are
those of airbench94's clock, which leaves evaluations out. They are of the machine as it was during
the run; run with `--workers 1`, and compare those of one seed alone, which follow each other.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_airbench import FLOAT, OWN, THOR_MUON, Study, save, without_a_gpu
from benchmarks.gpu_cifar10 import load
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.stores import key_of
from torch_thor.errors import require

CODE, DATA = Path("build/airbench/airbench94_muon.py"), Path("build/cifar10")
SEEDS = {2: (0, 1, 2), 4: (0, 1, 2), 8: (0,)}  # by epochs
CHANGES = FLOAT
STRIDE = 1  # between the images that are taken; more makes a run small

Job = dict[str, Any]
Row = dict[str, Any]
Rows = Mapping[str, Row]


def jobs(rows: Rows) -> list[Job]:
    """List the trainings, the shortest first; those of a seed follow each other."""
    return [
        {"optimizer": name, "epochs": epochs, "seed": seed}
        for epochs, seeds in SEEDS.items()
        for seed in seeds
        for name in (OWN, THOR_MUON)
    ]


def run(job: Job) -> dict[str, Any]:
    """Train once."""
    require(CODE.is_file(), f"{CODE} is missing: save it from KellerJordan/cifar10-airbench there")
    torch.set_num_threads(1)
    words, *splits = load(DATA)
    splits = [(images[::STRIDE], labels[::STRIDE]) for images, labels in splits]
    with (
        tempfile.TemporaryDirectory() as folder,
        without_a_gpu(),
        contextlib.redirect_stdout(None),  # airbench94 prints a table
    ):
        save(splits, Path(folder))
        study = Study(CODE, Path(folder), torch.device("cpu"), CHANGES)
        found = study.train(job["optimizer"], job["epochs"], job["seed"])
    return {"value": found["tta_val_acc"], "data": words, **found}


def optimizers(job: Job) -> list[str]:
    """Name ours among those that a job trains with."""
    return ["ThorMuon"] if job["optimizer"] == THOR_MUON else []


def headlines(rows: Rows) -> list[Job]:
    """Return the shortest trainings, with one seed."""
    return jobs(rows)[:2]


def tolerance(rows: Rows, job: Job) -> float:
    """Return how far an accuracy may differ on another machine."""
    return 0.01


def table(rows: Rows) -> str:
    """Return a line for each optimizer and number of epochs."""
    lines = []
    for epochs, seeds in SEEDS.items():
        for name in (OWN, THOR_MUON):
            asked = [{"optimizer": name, "epochs": epochs, "seed": seed} for seed in seeds]
            own = [rows[key_of(job)] for job in asked if key_of(job) in rows]
            if own:
                lines.append([str(epochs), name, *cells(rows, own)])
    heads = ("epochs", "optimizer", "seeds", "accuracy after each", "at the end")
    return markdown((*heads, "seconds over its own's", "data"), lines)


def cells(rows: Rows, own: list[Row]) -> list[str]:
    """Return what several seeds of one training show."""
    after = [statistics.fmean(values) for values in zip(*(r["val_acc"] for r in own), strict=True)]
    last = [row["value"] for row in own]
    pairs = [(row, rows.get(key_of({**row["job"], "optimizer": OWN}))) for row in own]
    ratios = [
        row["train_seconds"] / other["train_seconds"] for row, other in pairs if other is not None
    ]
    return [
        str(len(own)),
        ", ".join(f"{value:.3f}".lstrip("0") for value in after),
        with_error(last) if len(last) > 1 else f"{last[0]:.4f}",
        f"{statistics.median(ratios):.2f}" if ratios else "",
        ", ".join(sorted({row["data"] for row in own})),
    ]
