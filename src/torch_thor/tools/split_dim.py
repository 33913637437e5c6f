"""`torch-thor split-dim`: choose a model's split dimension on this device from real images."""

import json
import math
import random
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from torch_thor import __version__
from torch_thor.errors import UserError, explaining, first_line, require
from torch_thor.files import check_place, whole_file, write_text, writing
from torch_thor.printing import columns, milliseconds, printer, visible
from torch_thor.split import FACTORS, SplitChoice, choose_split_dim
from torch_thor.training.models.library import build_library_model, build_model
from torch_thor.training.models.small import CLASSIFIERS
from torch_thor.training.parallel import device_of
from torch_thor.training.recipe_model import Transform

CHANNELS, CLASSES = 3, 1000  # of ImageNet; models of torchvision and timm have as many by default


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
) -> SplitChoice:
    """Choose an optimizer's split dimension for a model; print a table, write a figure and JSON."""
    figure, numbers = folder / "split_dim.png", folder / "split_dim.json"
    say = printer(console)
    for file in (figure, numbers):
        require(
            overwrite or not file.exists(),
            f"{file} exists already: give another --out, or --overwrite",
        )
    check_place(folder)
    require(
        optimizer in FACTORS,
        f"--optimizer {optimizer}: only {' and '.join(FACTORS)} split factors; give one",
    )
    choice, results = measure_split_dim(
        model,
        console,
        optimizer=optimizer,
        device=device,
        batch=batch,
        pixels=pixels,
        data=data,
        seed=seed,
    )
    console.print(table(choice))
    say(verdict(choice))
    # the results have been printed already
    with writing(folder, "choose another folder with --out"):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(numbers, json.dumps(results, indent=1) + "\n")
        draw_choice(choice, model, figure)
    say(f"Figure and numbers are in {folder}")
    return choice


def require_at_least(least: int, **given: int | None) -> None:
    """Refuse smaller values of options."""
    for option, value in given.items():
        require(value is None or value >= least, f"--{option} {value}: give {least} or more")


def measure_split_dim(
    model: str,
    console: Console,
    *,
    optimizer: str,
    device: str,
    batch: int,
    pixels: int,
    data: Path | None,
    seed: int,
) -> tuple[SplitChoice, dict[str, Any]]:
    """Return the choice for a model, and all measured values and settings as JSON values."""
    require_at_least(1, batch=batch, pixels=pixels)
    require(
        0 <= seed < 2**63, f"--seed {seed}: must be between 0 and 2^63 - 1; give another number"
    )
    where, subject = device_of(device), load_subject(model, seed)
    sample, source = subject.batch, f"the batch that {model} returned"
    of_images = sample is None
    if of_images:
        sample, source = sample_images(batch, pixels, data, seed, printer(console))
    printer(console)(
        f"{model}, {optimizer} on {where}; sample: {source}. Inverting large blocks takes long ..."
    )
    with explaining(
        (RuntimeError, ValueError, TypeError, AttributeError),
        lambda error: (
            f"{model} could not be measured: {first_line(error)} (try other --pixels or --batch, "
            "or give a FILE.py:FUNCTION that returns (model, batch, loss_fn))"
        ),
    ):
        choice = choose_split_dim(
            subject.model, sample, where, loss_fn=subject.loss_fn, optimizer=optimizer
        )
    settings = {
        "model": model,
        "optimizer": optimizer,
        "sample": source,
        "batch": batch if of_images else None,
        "pixels": pixels if of_images else None,
        "seed": seed,
        "torch": torch.__version__,
        "torch_thor": __version__,
    }
    return choice, {**settings, **choice.as_dict()}


class Subject(NamedTuple):
    """What a user's function returns: a model, its mode kept, a sample batch and loss function."""

    model: nn.Module
    batch: Any = None
    loss_fn: Callable[..., Tensor] | None = None


def load_subject(word: str, seed: int) -> Subject:
    """Build the model that a user names, with random weights."""
    torch.manual_seed(seed)
    file, colon, function = word.rpartition(":")
    if word in CLASSIFIERS:
        return Subject(build_model(word, CHANNELS, CLASSES))
    if not (colon and file.endswith(".py")):
        with explaining(
            UserError, lambda error: f"{error}; for your own model give FILE.py:FUNCTION"
        ):
            return Subject(build_library_model(word))
    require(
        Path(file).is_file(),
        f"{file} does not exist: give FILE.py:FUNCTION, a function that returns a model",
    )
    with explaining(
        Exception,
        lambda error: f"{word} failed: {type(error).__name__}: {first_line(error)}; correct {file}",
    ):
        returned = runpy.run_path(file)[function]()
    parts = returned if isinstance(returned, tuple) else (returned,)
    require(
        1 <= len(parts) <= 3 and isinstance(parts[0], nn.Module),
        f"{word} returned an object of type {type(returned).__name__}: return a model, (model, "
        "batch) or (model, batch, loss_fn)",
    )
    return Subject(*parts)


def sample_images(
    count: int,
    pixels: int,
    folder: Path | None,
    seed: int,
    say: Callable[[str], None] = print,
) -> tuple[Tensor, str]:
    """Return random crops, (count, 3, pixels, pixels), and their source.

    The crops are flipped and normalised as for ImageNet.
    """
    from torchvision.transforms import v2

    if folder is None:
        from sklearn.datasets import load_sample_images

        photographs = [
            torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images
        ]
        source = "crops of the two photographs in scikit-learn (use --data for your own images)"
    else:
        photographs, source = (
            _images_of(folder, count, seed, say),
            f"crops of {count} images of {folder}",
        )
    usual = Transform()
    prepare = v2.Compose(
        [
            v2.RandomResizedCrop(pixels, scale=usual.scale, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(usual.mean, usual.std),
        ]
    )
    torch.manual_seed(seed)
    return torch.stack([prepare(photographs[i % len(photographs)]) for i in range(count)]), source


def _images_of(folder: Path, count: int, seed: int, say: Callable[[str], None]) -> list[Tensor]:
    from torch_thor.training.data.decoding import BrokenImageError, decode_rgb, read_image
    from torch_thor.training.data.images import list_images

    paths = list_images(folder, say) if folder.is_dir() else []
    require(
        len(paths) >= count,
        f"--data {folder} contains {len(paths)} images, fewer than --batch {count}: give a smaller "
        "--batch or more images",
    )

    def decoded(path: Path) -> Tensor:
        with explaining(
            BrokenImageError,
            lambda error: (
                f"{path} cannot be read as an image ({first_line(error)}): remove or repair it"
            ),
        ):
            return decode_rgb(read_image(path))

    return [decoded(path) for path in random.Random(seed).sample(paths, count)]


def verdict(choice: SplitChoice) -> str:
    """Describe the choice and its reason in a sentence."""
    reason = (
        "The curves do not cross, because even unsplit factors are cheap"
        if choice.crossing is None
        else f"The curves cross at {choice.crossing:.0f}"
    )
    return f"{reason}: split_dim={choice.split_dim}"


def table(choice: SplitChoice) -> Table:
    """Make a table of both curves; `split_dim.json` has the losses of each layer too."""
    curves = zip(
        choice.candidates, choice.information, choice.performance, choice.seconds, strict=True
    )
    return columns(
        f"Split dimension on {choice.device}",
        ("block size s", "factors that lose < 1 %", "p_1 / p_s", "p_s: one refresh", ""),
        [
            (
                str(size),
                f"{kept:.1%}",
                f"{speed:.3f}",
                milliseconds(seconds),
                "<- chosen" if size == choice.split_dim else "",
            )
            for size, kept, speed, seconds in curves
        ],
    )


def draw_choice(
    choice: SplitChoice,
    title: str,
    path: Path,
    elsewhere: Mapping[str, float] | None = None,
) -> None:
    """Draw both curves and mark where they cross.

    `elsewhere` has crossings from other sources, by their labels.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot, which may open windows

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(choice.candidates, choice.performance, marker="o", label="performance: $p_1 / p_s$")
    axes.plot(
        choice.candidates,
        choice.information,
        marker="s",
        label="information: factors that lose < 1 % of their norm",
    )
    if choice.crossing is not None:
        axes.axvline(
            choice.crossing,
            color="grey",
            linestyle="--",
            label=f"crossing at {choice.crossing:.0f}: split_dim={choice.split_dim}",
        )
    for label, crossing in (elsewhere or {}).items():
        axes.axvline(crossing, color="#d55e00", linestyle=":", label=label)
    axes.set_xscale("log", base=2)
    sizes = zip(choice.candidates, (*choice.candidates[1:], math.inf), strict=True)
    # labels such as 4096 and 4608 would overlap
    axes.set_xticks(
        choice.candidates, ["" if after < 1.3 * size else str(size) for size, after in sizes]
    )
    axes.minorticks_off()
    # matplotlib would read $ as the beginning of a formula
    title = visible(title).replace("$", r"\$")
    axes.set(xlabel="block size s", title=f"{title}, {choice.device}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center")
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=120)
