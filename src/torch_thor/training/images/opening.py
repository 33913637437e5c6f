"""From options to the two streams that a training needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torch_thor.training.errors import require
from torch_thor.training.images.broken import BrokenImages
from torch_thor.training.images.cache import Uncropped, open_cache
from torch_thor.training.images.cifar import SETS, open_cifar
from torch_thor.training.images.folder import FolderSource, open_folders
from torch_thor.training.images.reading import Crop, Workers, check_workers
from torch_thor.training.images.shards import EvaluationOrder, Shard, TrainingOrder
from torch_thor.training.images.source import ImageSource
from torch_thor.training.images.stream import ImageLoader, TrainingStream
from torch_thor.training.images.transforms import (
    CIFAR,
    IMAGENET,
    EvaluationTransform,
    ImageTransform,
    Normalize,
    TrainingTransform,
)

FOLDER = "image-folder"


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """Which images, and how they are read.

    Args:
        name: image-folder (ImageNet-2012 or any set in its shape), cifar10 or cifar100.
        root: The folder that holds the splits. For CIFAR `None` is ~/.cache/torch-thor.
        download: Whether CIFAR's files may be downloaded.
        transform: Sizes and chances; `None` is 224 pixels out of 256 for folders, 32 out of 32 for CIFAR, the mean and
            deviation of ImageNet or CIFAR-10.
        workers: The processes that read and crop, for training and evaluation each.
        max_broken: Greatest share of an epoch's images that may be broken.
        cache: Folder for decoded evaluation images, of image-folder only; `None` decodes at each evaluation.
    """

    name: str = FOLDER
    root: str | None = None
    download: bool = True
    transform: ImageTransform | None = None
    workers: Workers = field(default_factory=Workers)
    max_broken: float = 0.01
    cache: str | None = None

    def __post_init__(self) -> None:
        names = (FOLDER, *SETS)
        require(self.name in names, f"data.name={self.name} is no set of images: use one of {', '.join(names)}")
        require(
            self.root is not None or self.name in SETS,
            f"data.root is not set: {FOLDER} needs the folder that holds train/ and val/",
        )
        require(
            self.cache is None or self.name == FOLDER,
            f"data.cache={self.cache}: {self.name} is in memory already; leave data.cache=null",
        )


@dataclass(frozen=True)
class ImageData:
    """What a training reads.

    Args:
        train: Training batches of this rank.
        evaluation: Evaluation batches of this rank.
    """

    train: TrainingStream
    evaluation: ImageLoader

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.train.classes)


def open_images(
    spec: ImageSpec,
    *,
    batch_size: int,
    seed: int,
    device: torch.device,
    say: Callable[[str], None],
    shard: Shard | None = None,
    processes: int = 1,
) -> ImageData:
    """Find the images, check them and build the streams.

    Args:
        spec: Which images, and how they are read.
        batch_size: Images in a batch of one rank, in training and at most in evaluation.
        seed: Decides order and crops, with the epoch's number.
        device: Where batches go.
        say: Told, in one line each, of warnings and of broken images.
        shard: Which rank of how many; `None` is the only one.
        processes: Training processes on this machine, to count the workers of all.

    Returns:
        Both streams.
    """
    check_workers(spec.workers, processes, say)
    transform = spec.transform or (IMAGENET if spec.name == FOLDER else CIFAR)
    train, evaluation = _sources(spec, say)
    crop: Crop = EvaluationTransform(transform)
    if spec.cache is not None and isinstance(evaluation, FolderSource):
        evaluation = open_cache(Path(spec.cache), evaluation, EvaluationTransform(transform), spec.workers, say)
        crop = Uncropped(transform.size)
    shard = shard or Shard()
    order = TrainingOrder(len(train.labels), batch_size, seed, shard)

    def loader(source: ImageSource, crop: Crop, order: TrainingOrder | EvaluationOrder) -> ImageLoader:
        return ImageLoader(
            source,
            crop,
            order,
            normalize=Normalize(transform.mean, transform.std),
            workers=spec.workers,
            broken=BrokenImages(spec.max_broken, say),
            device=device,
        )

    return ImageData(
        TrainingStream(loader(train, TrainingTransform(transform, seed), order), order),
        loader(evaluation, crop, EvaluationOrder(len(evaluation.labels), batch_size, shard)),
    )


def _sources(spec: ImageSpec, say: Callable[[str], None]) -> tuple[ImageSource, ImageSource]:
    root = Path(spec.root) if spec.root is not None else Path.home() / ".cache" / "torch-thor"
    if spec.name == FOLDER:
        return open_folders(root.expanduser(), say)
    return open_cifar(spec.name, root.expanduser(), download=spec.download)
