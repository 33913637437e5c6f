"""`torch-thor split-dim`: choose a model's split dimension on this device from real images."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from torch_thor.errors import require
from torch_thor.printing import columns, milliseconds, printer
from torch_thor.split import SplitChoice, choose_split_dim
from torch_thor.training.models.library import build_model
from torch_thor.training.parallel import device_of
from torch_thor.training.recipe_model import Transform

CLASSES = 1000  # of ImageNet; models of torchvision and timm have as many by default


def split_dim(
    model: str,
    folder: Path,
    console: Console,
    *,
    optimizer: str = "thor-muon",
    device: str = "auto",
    batch: int = 32,
    pixels: int = 224,
    data: Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Choose an optimizer's split dimension for a model; print a table, write a figure and JSON."""
    numbers = folder / "split_dim.json"
    require(
        overwrite or not numbers.exists(),
        f"{numbers} exists already: give another --out, or --overwrite",
    )
    folder.mkdir(parents=True, exist_ok=True)  # fails here, not after minutes of work
    where, subject = device_of(device), load_subject(model, seed)
    if subject.batch is None:
        subject = subject._replace(batch=sample_images(batch, pixels, data, seed))
    printer(console)(f"{model}, {optimizer} on {where}. Inverting large blocks takes long ...")
    choice = choose_split_dim(
        subject.model, subject.batch, where, loss_fn=subject.loss_fn, optimizer=optimizer
    )
    results = {
        "model": model,
        "optimizer": optimizer,
        "data": data and str(data),
        "batch": batch,
        "pixels": pixels,
        "seed": seed,
        **choice.as_dict(),
    }
    lines = [
        (
            str(size),
            f"{choice.information[i]:.1%}",
            f"{choice.performance[i]:.3f}",
            milliseconds(choice.seconds[i]),
            "<- chosen" if size == choice.split_dim else "",
        )
        for i, size in enumerate(choice.candidates)
    ]
    console.print(
        columns(
            f"Split dimension on {choice.device}",
            ("block size s", "factors that lose < 1 %", "p_1 / p_s", "p_s: one refresh", ""),
            lines,
        )
    )
    numbers.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw_choice(choice, model, folder / "split_dim.png")
    printer(console)(f"{verdict(choice)}. Figure and numbers are in {folder}")


class Subject(NamedTuple):
    """What a user's function returns: a model, its mode kept, a sample batch and loss function."""

    model: nn.Module
    batch: Any = None
    loss_fn: Callable[..., Tensor] | None = None


def load_subject(word: str, seed: int) -> Subject:
    """Build the classifier that a user names with random weights, or call a FILE.py:FUNCTION."""
    torch.manual_seed(seed)
    if ".py:" not in word:
        return Subject(build_model(word, 3, CLASSES))
    file, function = word.rsplit(":", 1)
    returned = runpy.run_path(file)[function]()
    return Subject(*returned) if isinstance(returned, tuple) else Subject(returned)


def sample_images(count: int, pixels: int, folder: Path | None, seed: int) -> Tensor:
    """Return random crops, (count, 3, pixels, pixels), of images in a folder or of scikit-learn.

    The crops are flipped and normalised as for ImageNet.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader
    from torchvision.transforms import v2

    torch.manual_seed(seed)
    if folder is None:
        from sklearn.datasets import load_sample_images

        images = [image.copy() for image in load_sample_images().images]
    else:
        files = sorted(f for f in folder.rglob("[!.]*") if f.suffix.lower() in IMG_EXTENSIONS)
        require(files != [], f"--data {folder} contains no images: give another folder")
        images = [default_loader(str(files[i])) for i in torch.randperm(len(files))[:count]]
    prepare = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(pixels),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(Transform().mean, Transform().std),
        ]
    )
    return torch.stack([prepare(images[i % len(images)]) for i in range(count)])


def verdict(choice: SplitChoice) -> str:
    """Describe the choice and its reason in a sentence."""
    reason = (
        "do not cross, because even unsplit factors are cheap"
        if choice.crossing is None
        else f"cross at {choice.crossing:.0f}"
    )
    return f"The curves {reason}: split_dim={choice.split_dim}"


def draw_choice(
    choice: SplitChoice,
    title: str,
    path: Path,
) -> None:
    """Draw both curves and mark where they cross."""
    from matplotlib.figure import Figure  # slow to import; without pyplot, which may open windows

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(choice.candidates, choice.performance, "o-", label="performance: $p_1 / p_s$")
    axes.semilogx(
        choice.candidates,
        choice.information,
        "s-",
        base=2,
        label="information: factors that lose < 1 % of their norm",
    )
    if choice.crossing is not None:
        axes.axvline(choice.crossing, color="grey", linestyle="--", label=verdict(choice))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="block size s", title=f"{title}, {choice.device}")
    figure.legend(loc="outside lower center")
    figure.savefig(path, dpi=120)
