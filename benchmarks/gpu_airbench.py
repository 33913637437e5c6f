"""CIFAR-10 with airbench94: its own Muon and SGD, and ThorMuon in their place.

airbench94_muon.py of KellerJordan/cifar10-airbench is read from a file and run as it is: network,
augmentation, schedule, evaluation and clock are its own. Only the optimizers are replaced, the
folder of the data, and the number of epochs, of which it trains the whitening bias in the first
3/8 (3 of 8). The network has float16 weights:

- "Muon + SGD" is what it has itself.
- "ThorMuon" trains all parameters in the place of both, with no option given. It takes float16
  weights as they are, and computes in float32.
- "ThorMuon + SGD" has its SGD for all but the filters.

The network is compiled without `max-autotune`, which takes more than three minutes.

A training with random labels goes first for each, in which the network is compiled. One line of
JSON is appended for each training.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.gpu_cifar10 import Split, load
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from torch_thor import ThorMuon

OWN, THOR_MUON, FILTERS = "Muon + SGD", "ThorMuon", "ThorMuon + SGD"
FLOAT = {".half()": ".float()", ".bfloat16()": ".float()"}  # a CPU takes minutes for the half
TINY = {"batch_size = 2000": "batch_size = 20", **FLOAT}
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


def optimizers(name: str, model: nn.Module, module: ModuleType) -> dict[str, Any]:
    """Return what stands in the place of ``torch.optim.SGD`` and of the module's Muon."""
    sgd, own = torch.optim.SGD, module.Muon
    if name == THOR_MUON:
        return {"SGD": partial(thor_muon_of_all, model), "Muon": Nothing}
    if name == FILTERS:
        return {"SGD": sgd, "Muon": lambda filters, **_: ThorMuon(filters, model=model)}
    return {"SGD": sgd, "Muon": own}


# ---- the fetched file ----------------------------------------------------------------------------


def read(code: Path, changes: dict[str, str]) -> ModuleType:
    """Run the fetched file as a module, with texts in it changed.

    Raises:
        ValueError: A text is not in the file, which is another version.
    """
    text = code.read_text()
    for old, new in changes.items():
        if old not in text:
            raise ValueError(f"{old!r} is not in {code}: take airbench94_muon.py of 2025 or later")
        text = text.replace(old, new)
    module = sys.modules["airbench94_muon"] = ModuleType("airbench94_muon")
    module.__file__ = str(code)
    # the file reads itself by the name of the command
    with mock.patch.object(sys, "argv", [str(code)]):
        exec(compile(text, str(code), "exec"), vars(module))
    return module


class Event:
    """torch.cuda.Event without a GPU."""

    def __init__(self, *, enable_timing: bool) -> None: ...

    def record(self) -> None:
        """Note the time."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Return milliseconds."""
        return 1000 * (end.at - self.at)


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Let the file run on a CPU, where nothing is compiled."""
    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "synchronize"),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def save(splits: Sequence[Split], folder: Path) -> None:
    """Write the data as the file reads them: those for training, and those for testing."""
    for name, (images, labels) in zip(("train", "test"), splits, strict=True):
        saved = {"images": images, "labels": labels, "classes": []}
        torch.save(saved, folder / f"{name}.pt")


class Study:
    """The trainings, on one network that is compiled once.

    Args:
        code: The fetched file.
        data: The folder of train.pt and test.pt.
        device: Where.
        own: Texts of the file that are changed for a CPU, where nothing is compiled.
    """

    def __init__(self, code: Path, data: Path, device: torch.device, own: dict[str, str]) -> None:
        self.epochs = 8
        changes = {
            "ceil(8 *": "ceil(EPOCHS() *",
            "ceil(3 *": "ceil(EPOCHS() * 3 / 8 *",
            '"cifar10"': repr(str(data)),
            'torch.device("cuda")': f"torch.device({str(device)!r})",
            **own,
        }
        self.module, self.device = read(code, changes), device
        self.module.EPOCHS = lambda: self.epochs  # type: ignore[attr-defined]
        self.model = self.module.CifarNet().to(device).to(memory_format=torch.channels_last)
        if device.type == "cuda":
            self.model.compile()

    def train(self, name: str, epochs: int, seed: int | str) -> dict[str, Any]:
        """Train once; the seed "warmup" has random labels, for the compiler.

        Returns:
            Accuracies after each epoch, with test-time augmentation at the end, and seconds.
        """
        self.epochs = epochs
        torch.manual_seed(WEIGHT_SEED + (0 if isinstance(seed, str) else seed))
        logged: list[dict[str, Any]] = []
        replaced = optimizers(name, self.model, self.module)
        start = time.monotonic()
        with (
            mock.patch.object(torch.optim, "SGD", replaced["SGD"]),
            mock.patch.object(self.module, "Muon", replaced["Muon"]),
            mock.patch.object(
                self.module,
                "print_training_details",
                lambda variables, is_final_entry: logged.append(
                    {key: variables.get(key) for key in ("val_acc", "train_acc", "time_seconds")}
                ),
            ),
        ):
            final = self.module.main(seed, self.model)
        return {
            "val_acc": [one["val_acc"] for one in logged[:-1]],
            "train_acc": [one["train_acc"] for one in logged[:-1]],
            "tta_val_acc": final,
            "train_seconds": logged[-2]["time_seconds"],  # without evaluations, by its clock
            "seconds": time.monotonic() - start,
        }


# ---- all trainings -------------------------------------------------------------------------------


def jobs(seeds: int) -> Iterator[tuple[str, int, int]]:
    """Yield optimizer, epochs and seed of all trainings, in the order of importance."""
    for epochs in (8, 4, 2):
        for seed in range(seeds):
            yield OWN, epochs, seed
            yield THOR_MUON, epochs, seed
        if epochs == 8:
            for seed in range(seeds):
                yield FILTERS, epochs, seed


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a training, or what stopped it."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        return {"failure": f"{type(error).__name__}: {error}"}


def run(options: argparse.Namespace) -> None:
    """Train all, as far as the time goes."""
    end, device = time.monotonic() + options.seconds, torch.device(options.device)
    start = time.monotonic()
    # decoding forks, which must come before CUDA
    words, *splits = load(options.data, min(16, len(os.sched_getaffinity(0))))
    print(f"{words}: read in {time.monotonic() - start:.1f} s", flush=True)
    if options.tiny:
        splits = [(images[::1000], labels[::1000]) for images, labels in splits]
    with tempfile.TemporaryDirectory() as folder:
        save(splits, Path(folder))
        study = Study(options.code, Path(folder), device, TINY if options.tiny else {})
        warm: set[str] = set()
        last, warm_up = 0.0, 1 if options.tiny else 8
        for name, epochs, seed in jobs(1 if options.tiny else 3):
            if time.monotonic() + last > end:
                print("out of time", flush=True)
                return
            begun = time.monotonic()
            if name not in warm:
                one = attempt(partial(study.train, name, warm_up, "warmup"))
                print(f"{name}: warm after {time.monotonic() - begun:.1f} s", flush=True)
                warm.add(name)
                if "failure" in one:
                    append(options.out, {"job": {"optimizer": name, "seed": "warmup"}, **one})
            begun = time.monotonic()
            row = attempt(partial(study.train, name, epochs, seed))
            last = time.monotonic() - begun
            job = {"optimizer": name, "epochs": epochs, "seed": seed, "data": words}
            append(options.out, {"job": job, **row})


def append(file: Path, row: dict[str, Any]) -> None:
    """Append a row to a file of JSON lines."""
    print(row, flush=True)
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each optimizer and number of epochs: means over seeds, standard errors."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "failure" not in row:
            job = row["job"]
            groups.setdefault((job["epochs"], job["optimizer"]), []).append(row)
    lines = []
    for (epochs, name), own in sorted(groups.items(), key=lambda item: (-item[0][0], item[0][1])):
        curve = [mean(accuracies) for accuracies in zip(*(r["val_acc"] for r in own), strict=True)]
        finals = [row["tta_val_acc"] for row in own]
        lines.append(
            [
                str(epochs),
                name,
                str(len(own)),
                ", ".join(f"{value:.3f}".lstrip("0") for value in curve),
                with_error(finals) if len(finals) > 1 else f"{finals[0]:.4f}",
                f"{mean(row['train_seconds'] for row in own):.2f}",
            ]
        )
    heads = ("epochs", "optimizer", "seeds", "accuracy after each", "with TTA", "seconds")
    return markdown(heads, lines)


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--code", type=Path, required=True, help="airbench94_muon.py")
    parser.add_argument("--data", type=Path, required=True, help="folder (gpu_cifar10.py)")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--seconds", type=float, default=1e9, help="no training starts later")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="few images, nothing compiled")
    options = parser.parse_args()
    if options.device == "cuda":
        run(options)
        return
    with without_a_gpu():
        run(options)


if __name__ == "__main__":
    main()
