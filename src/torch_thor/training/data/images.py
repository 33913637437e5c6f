"""Image sets that are cropped: CIFAR, and folders with a folder for each class, such as ImageNet.

Classes are numbered by their sorted folder names, and files are sorted within a class, as in
torchvision's `ImageFolder`, so that pretrained classifiers can be used. Files with the suffix of a
format that Pillow decodes are images. Hidden files and folders are skipped.

Pillow reads the header of a file, whose content determines the format. torchvision then decodes
JPEG, in two thirds of Pillow's time, and Pillow all other formats. torchvision's PNG decoder must
not be used: a damaged file ends the process with a segmentation fault in libpng. Greyscale,
palette, CMYK and transparent images become RGB by Pillow's `convert("RGB")`. Orientation tags are
ignored, as in the reference trainings on ImageNet.
"""

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.folder import make_dataset
from torchvision.io import decode_jpeg
from torchvision.io.image import ImageReadMode
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import normalize, pil_to_tensor

from torch_thor.errors import UserError, first_line, require
from torch_thor.training.data.batches import digest
from torch_thor.training.data.small import downloaded
from torch_thor.training.recipe_model import FOLDER, Data, Transform

SPLITS = (("train", "val"), ("train", "test"), ("ilsvrc", "ilsvrc_eval"))  # the first that is there
# Every worker would repeat Pillow's warnings about large images, palettes and EXIF data.
warnings.filterwarnings("ignore", module=r"PIL\b")
Image.init()
# EPS is a program, which Pillow would execute with Ghostscript; of the others it knows only the
# header.
FORMATS = Image.OPEN.keys() - {"EPS", "MPEG", "BUFR", "GRIB", "HDF5", "WMF"}
SUFFIXES = tuple(suffix for suffix, kind in Image.EXTENSION.items() if kind in FORMATS)


@dataclass(eq=False)
class Images(Dataset[Any]):
    """Cropped uint8 images, (3, size, size), and labels by key (epoch, index), or a fault's text.

    Args:
        source: Images (3, height, width), uint8, by index.
        labels: (N,), int64: places in `classes`.
        classes: The names of the classes of the training.
        crop: Crops an image.
        seed: The seed of the run. Random crops are functions of it and of the key.
    """

    source: Any
    labels: Tensor
    classes: Sequence[str]
    crop: Callable[[Tensor], Tensor]
    seed: int

    @property
    def data(self) -> dict[str, Any]:
        """What identifies the images, for `Task.data`."""
        return {
            "samples": len(self),
            "classes": list(self.classes),
            "files": self.source.checksum() if isinstance(self.source, Files) else None,
        }

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor] | str:
        epoch, index = key
        # torch.manual_seed would also seed the generators of CUDA
        torch.default_generator.manual_seed(digest(self.seed, epoch, index))
        try:
            return self.crop(self.source[index]), self.labels[index]
        except UserError as error:
            return str(error)


class Files:
    """The decoded image files of a folder, by index."""

    def __init__(self, paths: Sequence[str]) -> None:
        # one block of bytes: reading a Python string writes its reference count, so every forked
        # worker would copy the memory of a list of a million strings
        self.paths = np.array([os.fsencode(path) for path in paths])

    def __getitem__(self, index: int) -> Tensor:
        return read_image(os.fsdecode(self.paths[index]))

    def checksum(self) -> str:
        """Return the SHA-256 of the names of the files, relative to their folder."""
        start = len(os.path.commonpath([self.paths[0], self.paths[-1]]))  # of different classes
        return hashlib.sha256(b"\0".join(path[start:] for path in self.paths)).hexdigest()


def read_image(path: str | Path) -> Tensor:
    """Return the RGB image in a file, (3, height, width), uint8; of an animation, the first frame.

    Raises:
        UserError: If the file cannot be decoded, or has more than 8 bits a channel.
    """
    try:
        return _decoded(path)
    except Exception as error:  # Pillow's plugins raise many kinds of errors for damaged bytes
        raise UserError(f"{path} cannot be read ({first_line(error)})") from error


def _decoded(path: str | Path) -> Tensor:
    with Image.open(path) as image:
        require(image.format in FORMATS, f"{image.format} files are not supported")
        if image.format in ("JPEG", "MPO"):
            # torchvision fails for what is truncated, or of a kind that it lacks
            with suppress(RuntimeError):
                content = torch.from_numpy(np.fromfile(path, np.uint8))
                return cast(Tensor, decode_jpeg(content, ImageReadMode.RGB))
        # `convert` would make it black or white
        is_deep = image.mode.startswith(("I", "F"))
        require(not is_deep, f"mode {image.mode}: convert it to 8 bits a channel")
        return cast(Tensor, pil_to_tensor(image.convert("RGB")))


def open_images(
    data: Data,
    seed: int,
    *,
    train: bool = True,
    classes: Sequence[str] | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Images | None, Images]:
    """Return a data set's training images (None unless asked for) and evaluation images.

    Args:
        data: The data set.
        seed: The seed of the run.
        train: Whether the training images are needed.
        classes: The names of the classes of the training; None for those of the data set.
        say: Prints a line; it is called for each folder of which files are left out.

    Raises:
        UserError: If the images are missing or unsuitable.
    """
    options = data.crops
    parts = (
        _open_folders(data, train, classes, say)
        if data.name == FOLDER
        else _open_cifar(data, classes)
    )
    # He et al. 2016, section 3.4, in torchvision's form
    crop: Any = (
        v2.RandomResizedCrop(options.size, scale=options.scale, ratio=options.ratio, antialias=True)
        if options.padding is None
        else v2.RandomCrop(options.size, padding=options.padding, pad_if_needed=True)
    )
    crop = v2.Compose([crop, v2.RandomHorizontalFlip(options.flip)])
    centre = v2.Compose([v2.Resize(options.resize, antialias=True), v2.CenterCrop(options.size)])
    return Images(*parts[0], crop, seed) if train else None, Images(*parts[-1], centre, seed)


_Part = tuple[Any, Tensor, Sequence[str]]  # the first arguments of `Images`


def _open_cifar(data: Data, classes: Sequence[str] | None) -> list[_Part]:
    return [
        (
            torch.from_numpy(part.data).permute(0, 3, 1, 2),
            _numbers(part.classes, classes or part.classes, data.name)[part.targets],
            classes or part.classes,
        )
        for part in downloaded(CIFAR10 if data.name == "cifar10" else CIFAR100, data)
    ]


def _open_folders(
    data: Data, train: bool, classes: Sequence[str] | None, say: Callable[[str], None]
) -> list[_Part]:
    for names in SPLITS:
        folders = [data.folder() / name for name in (names if train else names[1:])]
        if all(folder.is_dir() for folder in folders):
            break
    else:
        raise UserError(
            f"data.root={data.root}: {data.folder()} must contain "
            f"{' or '.join(' and '.join(names) for names in SPLITS)}, each with a folder for each "
            "class: give such a folder as data.root=FOLDER"
        )
    parts: list[_Part] = []
    for folder in folders:
        parts.append(_labelled(folder, classes, say))
        classes = parts[0][2]
    return parts


def _labelled(folder: Path, classes: Sequence[str] | None, say: Callable[[str], None]) -> _Part:
    """Return the files, labels and classes of a folder of class folders."""
    others = Counter[str]()

    def is_image(path: str) -> bool:
        if f"{os.sep}." in path.removeprefix(str(folder)):  # it is hidden
            return False
        suffix = Path(path).suffix.lower()
        if suffix not in SUFFIXES:
            others[suffix or "no suffix"] += 1
        return suffix in SUFFIXES

    names = sorted(
        item.name for item in folder.iterdir() if not (item.name.startswith(".") or item.is_file())
    )
    classes = names if classes is None else classes
    require(
        len(classes) > 1 and names != [],
        f"{folder} must contain a folder for each of two or more classes: sort the images into "
        "them",
    )
    numbers = dict(zip(names, _numbers(names, classes, str(folder)).tolist(), strict=True))
    try:
        images = make_dataset(folder, numbers, is_valid_file=is_image)
    except FileNotFoundError as error:
        raise UserError(
            f"{folder}: {error}: add images of a format that Pillow reads (JPEG, PNG, WebP, TIFF, "
            "...), or remove the class"
        ) from error
    if others:
        kinds = ", ".join(f"{suffix} {number}" for suffix, number in others.most_common(4))
        say(f"{folder}: {others.total()} files are no images and are left out ({kinds})")
    paths, labels = zip(*images, strict=True)
    return Files(paths), torch.tensor(labels), classes


def _numbers(names: Sequence[str], classes: Sequence[str], place: str) -> Tensor:
    """Return the label of each name, its place among the classes of the training."""
    unknown = sorted(set(names) - set(classes))
    require(
        not unknown,
        f"{place}: the training has no class {', '.join(unknown)}: name the folders as in the "
        "training, or remove them",
    )
    return torch.tensor([classes.index(name) for name in names])


def collate(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Make a batch: images (n, 3, size, size), uint8, channels_last, and labels (n,)."""
    images, labels = zip(*samples, strict=True)
    batch = torch.empty(
        len(images), *images[0].shape, dtype=torch.uint8, memory_format=torch.channels_last
    )
    return torch.stack(images, out=batch), torch.stack(labels)


def normalised(images: Tensor, options: Transform) -> Tensor:
    """Convert uint8 images to float32 and normalise each channel, on their device."""
    # On a host the float32 images would be four times as many bytes to copy to the device.
    mean, std = (torch.tensor(values).mul(255).tolist() for values in (options.mean, options.std))
    return cast(Tensor, normalize(images.float(), mean, std, inplace=True))
