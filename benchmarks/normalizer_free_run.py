"""One training of normalizer_free.py: Fashion-MNIST, a network of timm, SGD or AGC-SGD, trained by the application."""

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torch_thor import AGCSGD
from torch_thor.bench import Folder, describe, trained
from torch_thor.training import Observer, Point, Ranks, build, device_of, evaluate, load_recipe, loop
from torch_thor.training.models.library import build_model
from torch_thor.training.tasks.images import ImageClassification

STORE = Folder(Path(__file__).parent / "results" / "normalizer_free")
MOMENTUM = 0.9
CLIP_FACTOR = {128: 0.02, 16: 0.04, 4: 0.08}  # the paper's λ grows as the batch shrinks (its section 4.1)
LOSS_OF_GUESSING = math.log(10)  # ten classes


class ResizedClassification(ImageClassification):
    """Image classification at a size of choice, by a network as its library builds it."""

    size: int  # height and width that images are scaled to

    def model(self) -> nn.Module:
        """Build the network, behind the scaling where images have another size."""
        channels, *shape = self.recipe.data.image_shape
        network = build_model(self.recipe.model, channels, self.outputs)
        if shape == [self.size, self.size]:
            return network
        return nn.Sequential(nn.Upsample((self.size, self.size), mode="bilinear"), network)


class _ClippedUnits(Observer):
    """Notes the share of units that each step of AGC-SGD clips."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def step(self, run: loop.Run, point: Point) -> None:
        if isinstance(run.optimizer, AGCSGD) and run.optimizer.clip_statistics is not None:
            self.shares.append(float(run.optimizer.clip_statistics.share))


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        question: ``"rates"``, ``"batches"`` or ``"parts"``.
        model: a name of timm's.
        optimizer: ``"sgd"`` or ``"agc-sgd"``.
        batch: batch size.
        lr: learning rate.
        images: how many training images are seen, in whole batches; what is left over is left out.
        size: height and width that images are resized to.
        seed: of weights and order.
        device: where.
        part: images a forward pass; 0 is the whole batch.
    """

    question: str
    model: str
    optimizer: str
    batch: int
    lr: float
    images: int
    size: int
    seed: int
    device: str
    part: int = 0

    @property
    def key(self) -> str:
        """Name of its raw data."""
        part = f"-part{self.part}" if self.part else ""
        return f"{self.question}-{self.model}-{self.optimizer}-b{self.batch}{part}-lr{self.lr:g}-seed{self.seed}"

    def result(self) -> dict[str, Any]:
        """Return the raw data."""
        found = STORE.read(self.key)
        other = {key: found[key] for key, value in asdict(self).items() if found.get(key, value) != value}
        if other:
            raise SystemExit(f"{STORE.file(self.key)} was measured with {other}: give these options, or move the file")
        return found

    def new_run(self) -> loop.Run:
        """Prepare the training."""
        steps = self.images // self.batch
        words: dict[str, object] = {
            "model": f"timm:{self.model}",
            "optimizer": self.optimizer,
            "lr": self.lr,
            "momentum": MOMENTUM,
            "weight_decay": 0,
            "batch_size": self.batch,
            "accumulation": self.batch // (self.part or self.batch),
            "steps": steps,
            "eval_interval": steps,
            "schedule.kind": "constant",
            "seed": self.seed,
            "device": self.device,
        }
        if self.optimizer == "agc-sgd":
            words["clip_factor"] = CLIP_FACTOR[self.batch]
        recipe = load_recipe("fashion-mnist", [f"{key}={value}" for key, value in words.items()])
        device = device_of(recipe.device)
        task = ResizedClassification(recipe, device, print)
        task.size = self.size
        return build(recipe, self.optimizer, task, Ranks(device=device))

    def run(self) -> dict[str, Any]:
        """Train."""
        import timm

        run, clipped = self.new_run(), _ClippedUnits()
        record, failure = trained(run, [clipped])
        failed = failure is not None  # a result, not an accident
        metrics = evaluate(run.task, run.model, run.ranks) if failed else record.scores[-1].metrics
        losses = [point.loss for point in record.points]
        end = math.nan if failed else statistics.fmean(losses[-max(1, len(losses) // 20) :])
        return {
            **asdict(self),
            "momentum": MOMENTUM,
            "clip_factor": CLIP_FACTOR[self.batch] if self.optimizer == "agc-sgd" else None,
            "diverged": not end < LOSS_OF_GUESSING,
            "final_loss": None if failed else end,
            "accuracy": metrics["top1"],
            "share_of_units_clipped": statistics.fmean(clipped.shares) if clipped.shares else None,
            "loss": [*(round(value, 5) for value in losses), *[None] * failed],
            "seconds": round(run.seconds, 1),
            "timm": timm.__version__,
            "machine": describe(),
        }
