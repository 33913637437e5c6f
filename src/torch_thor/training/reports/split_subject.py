"""The inputs of `torch-thor split-dim`: a model by name or from a file, and a sample batch of real images."""

import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.training.errors import UserError, first_line, require
from torch_thor.training.models.library import find_model

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


@dataclass(frozen=True)
class Subject:
    """A model to be measured, with the sample batch and the loss function that the user gives.

    Args:
        name: The name that the user gave.
        model: The model, in the mode in which it was returned.
        sample_batch: The sample batch that the user's function returned; `None` uses images.
        loss_fn: The loss function that the user's function returned, for `torch_thor.choose_split_dim`; `None` uses its
            default.
    """

    name: str
    model: nn.Module
    sample_batch: Any = None
    loss_fn: Callable[..., Tensor] | None = None


def load_subject(word: str, seed: int) -> Subject:
    """Build the model that a user names.

    Args:
        word: A torchvision or timm name (`torchvision:NAME`, `timm:NAME`, or just `NAME`), or `FILE.py:FUNCTION`.
        seed: Seed of the random initialisation.

    Returns:
        The model, with what the user's function returned.

    Raises:
        UserError: If there is no such model, or the function fails or returns something else.
    """
    torch.manual_seed(seed)
    path, colon, function = word.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(word, Path(path), function)
    return Subject(word, find_model(word, [], "for your own model give FILE.py:FUNCTION").build())


def _from_file(word: str, path: Path, function: str) -> Subject:
    require(path.is_file(), f"{path} does not exist: give FILE.py:FUNCTION, a function that returns a model")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be imported: give a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        returned = getattr(module, function)()
    except Exception as error:
        raise UserError(f"{word} failed: {type(error).__name__}: {first_line(error)}") from error
    parts = returned if isinstance(returned, tuple) else (returned,)
    require(
        1 <= len(parts) <= 3 and isinstance(parts[0], nn.Module),
        f"{word} returned an object of type {type(returned).__name__}: return a model, (model, sample_batch) or "
        f"(model, sample_batch, loss_fn)",
    )
    return Subject(word, *parts)


def sample_images(count: int, pixels: int, folder: Path | None, seed: int) -> tuple[Tensor, str]:
    """Make random crops of photographs, flipped and normalised as in a training on ImageNet.

    Args:
        count: Number of crops.
        pixels: Height and width of a crop.
        folder: The folder of the images, which are found at any depth; `None` uses the two photographs of scikit-learn.
        seed: Seed of the choice of images and of the crops.

    Returns:
        Images (count, 3, pixels, pixels), and a description of their source.

    Raises:
        UserError: If the folder does not contain enough images, or one cannot be read.
    """
    from torchvision.transforms import v2

    photographs, source = _photographs(count, folder, seed)
    crop = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(pixels, scale=(0.08, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(_MEAN, _STD),
        ]
    )
    torch.manual_seed(seed)
    images = torch.stack([crop(photographs[index % len(photographs)]) for index in range(count)])
    return images.as_subclass(Tensor), source


def _photographs(count: int, folder: Path | None, seed: int) -> tuple[list[Any], str]:
    from PIL import Image
    from torchvision.transforms.v2.functional import to_pil_image

    from torch_thor.training.data.decoding import BrokenImageError, decode_rgb
    from torch_thor.training.data.image_files import read_image

    if folder is None:
        from sklearn.datasets import load_sample_images

        found = [Image.fromarray(image) for image in load_sample_images().images]
        return found, "crops of the two photographs in scikit-learn (use --data for your own images)"
    require(folder.is_dir(), f"--data {folder} is not a folder: give a folder with images")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    require(
        len(paths) >= count,
        f"--data {folder} contains {len(paths)} images, fewer than --batch {count}: give a smaller --batch or more "
        "images",
    )
    images = []
    for path in random.Random(seed).sample(paths, count):
        try:
            images.append(to_pil_image(decode_rgb(read_image(path))))
        except BrokenImageError as error:
            raise UserError(f"{path} cannot be read as an image: {first_line(error)}") from error
    return images, f"crops of {count} images of {folder}"
