"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), read and downloaded by torchvision, and kept in memory."""

from pathlib import Path
from urllib.error import URLError

import torch
from torchvision.datasets import CIFAR10, CIFAR100

from torch_thor.training.data.image_source import MemorySource
from torch_thor.training.errors import UserError, first_line

SETS: dict[str, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def open_cifar(name: str, root: Path, *, download: bool) -> tuple[MemorySource, MemorySource]:
    """Load a CIFAR set.

    Args:
        name: cifar10 or cifar100.
        root: The folder that contains `cifar-10-batches-py/` or `cifar-100-python/`, or that they are downloaded to.
        download: Whether missing files may be downloaded.

    Returns:
        The training images and the evaluation images, of 32 × 32 pixels.

    Raises:
        UserError: If files are missing or damaged, and may not or cannot be downloaded.
    """
    kind = SETS[name]
    try:
        train, evaluation = (kind(str(root), train=part, download=download) for part in (True, False))
    except (RuntimeError, URLError, OSError) as error:
        reason = first_line(error).removesuffix(".")
        place = root / kind.base_folder
        remedy = (
            "check the network, or unpack the archive there"
            if download
            else "unpack the archive there, or set data.download=true"
        )
        raise UserError(f"{name} is missing or incomplete in {place} ({reason}): {remedy}") from error
    return _source(train, f"{name}/train"), _source(evaluation, f"{name}/test")


def _source(part: CIFAR10, name: str) -> MemorySource:
    images = torch.from_numpy(part.data).permute(0, 3, 1, 2)
    return MemorySource(images, torch.tensor(part.targets), tuple(part.classes), name)
