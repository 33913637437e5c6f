"""Image sets that are cropped: CIFAR, and folders of files with a folder for each class, such as ImageNet.

Classes are numbered by their sorted folder names, and files are sorted within a class, as in torchvision's
`ImageFolder`, so that pretrained classifiers can be used. `ImageFolder` itself leaves out folders that cannot be read.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from torch_thor.training.data.batches import digest
from torch_thor.training.data.decoding import MAX_PIXELS, BrokenImageError, decode_rgb, read_image
from torch_thor.training.errors import UserError, first_line, require
from torch_thor.training.recipe import FOLDER, Data, Transform

SPLITS = (("train", "val"), ("ilsvrc", "ilsvrc_eval"))


class Images(Dataset[Any]):
    """Cropped images, (3, size, size), uint8, and their labels by key (epoch, index), or the text of what is broken.

    Args:
        source: Images (3, height, width), uint8, by index.
        where: The name of an image in messages, by index.
        labels: (N,), int64.
        classes: The names of the classes.
        crop: Crops an image.
        seed: The seed of the run. Random crops are functions of it and of the key.
    """

    def __init__(
        self, source: Any, where: Callable[[int], str], labels: Tensor, classes: Sequence[str],
        crop: Callable[[Tensor], Tensor], seed: int,
    ) -> None:  # fmt: skip
        self.source, self.where, self.labels, self.classes = source, where, labels, classes
        self.crop, self.seed = crop, seed

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor] | str:
        epoch, index = key
        # torch.manual_seed would also seed the generators of CUDA
        torch.default_generator.manual_seed(digest(self.seed, epoch, index))
        try:
            return self.crop(self.source[index]), self.labels[index]
        except BrokenImageError as error:
            return f"{self.where(index)} cannot be read ({error})"


class Files:
    """The decoded image files of a folder, by index."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        # one block of bytes: reading a Python string writes its reference count, so every forked worker would copy the
        # memory of a list of a million strings
        self.root, self.names = root, np.array([os.fsencode(name) for name in names])

    def where(self, index: int) -> str:
        """Return the path of an image."""
        return str(self.root / os.fsdecode(self.names[index]))

    def __getitem__(self, index: int) -> Tensor:
        return decode_rgb(read_image(Path(self.where(index))))


def open_images(
    data: Data, seed: int, say: Callable[[str], None], *, train: bool = True
) -> tuple[Images | None, Images]:
    """Return the checked training images (None unless they are asked for) and evaluation images of a data set.

    Raises:
        UserError: If the images are missing or unsuitable.
    """
    train_part, held_out = _open_folders(data, say, train) if data.name == FOLDER else _open_cifar(data)
    training = None if train_part is None else Images(*train_part, _random_crop(data.crops), seed)
    return training, Images(*held_out, _CentreCrop(data.crops), seed)


_Part = tuple[Any, Callable[[int], str], Tensor, Sequence[str]]  # the first arguments of `Images`


def _open_cifar(data: Data) -> tuple[_Part, _Part]:
    kind: type[CIFAR10] = {"cifar10": CIFAR10, "cifar100": CIFAR100}[data.name]
    root = data.folder()
    try:
        train, test = (kind(str(root), train=train, download=data.download) for train in (True, False))
    except (RuntimeError, URLError, OSError) as error:
        reason = first_line(error).removesuffix(".")
        remedy = "check the network, or unpack" if data.download else "set data.download=true, or unpack"
        raise UserError(
            f"{data.name} is missing or incomplete in {root / kind.base_folder} ({reason}): {remedy} the archive there"
        ) from error

    def part(images: CIFAR10, name: str) -> _Part:
        pixels = torch.from_numpy(images.data).permute(0, 3, 1, 2)
        return pixels, f"{data.name}/{name}[{{}}]".format, torch.tensor(images.targets), images.classes

    return part(train, "train"), part(test, "test")


def _open_folders(data: Data, say: Callable[[str], None], train: bool) -> tuple[_Part | None, _Part]:
    require(
        data.root is not None,
        f"data.root is not set: {FOLDER} needs the folder that contains train/ and val/; give it as data.root=FOLDER",
    )
    try:
        folders = _find_splits(data.folder(), train)
        classes = [_folders(folder) if folder.is_dir() else None for folder in folders]
        _check_classes(folders, classes)
        return _training_part(folders[0]) if train else None, _evaluation_part(folders[1], say)
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be listed ({error.strerror}), so its images would be missing: repair or remove it"
        ) from error


def _find_splits(root: Path, train: bool) -> list[Path]:
    require(root.is_dir(), f"data.root={root} is not a folder: set it to the folder that contains train/ and val/")
    for names in SPLITS:
        folders = [root / name for name in names]
        if folders[1].is_dir() and (folders[0].is_dir() or not train):
            return folders
    pairs = " or ".join(" and ".join(f"{name}/" for name in names[not train :]) for names in SPLITS)
    raise UserError(
        f"data.root={root} must contain {pairs}, each with a folder for each class; it contains {_some(_folders(root))}"
    )


def _check_classes(folders: Sequence[Path], classes: Sequence[Sequence[str] | None]) -> None:
    for folder, names in zip(folders, classes, strict=True):
        if names is not None and not names:
            flat = any(item.suffix.lower() in IMG_EXTENSIONS for item in folder.iterdir())
            state = "contains its images directly" if flat else "contains no folders"
            raise UserError(f"{folder} {state}: it must contain a folder for each class; sort the images into them")
    train, evaluation = classes
    if train is None or evaluation is None or train == evaluation:
        return
    only = [
        f"{_some(sorted(set(some) - set(rest)))} only in {folder.name}/"
        for folder, some, rest in ((folders[0], train, evaluation), (folders[1], evaluation, train))
        if set(some) - set(rest)
    ]
    raise UserError(
        f"{folders[0].parent}: the class folders of {folders[0].name}/ and {folders[1].name}/ differ "
        f"({'; '.join(only)}): labels are numbered in their sorted order, so both must have the same classes"
    )


def _training_part(folder: Path) -> _Part:
    part, empty = _part(folder)
    require(
        len(part[3]) > 1,
        f"{folder} contains only one class folder, {part[3][0]}: training a classifier needs two or more",
    )
    require(
        not empty,
        f"{folder}: no image in {_some(empty)}: add images ({', '.join(IMG_EXTENSIONS)}), or remove the class from "
        "both folders",
    )
    return part


def _evaluation_part(folder: Path, say: Callable[[str], None]) -> _Part:
    part, empty = _part(folder)
    require(len(empty) < len(part[3]), f"{folder} contains no image: add the evaluation images")
    if empty:
        say(f"{folder}: no image in {_some(empty)}: the accuracy is measured on the other classes only")
    return part


def _part(folder: Path) -> tuple[_Part, list[str]]:
    classes = _folders(folder)
    lists = [_list_files(folder / name) for name in classes]
    files = Files(folder, [os.path.relpath(path, folder) for paths in lists for path in paths])
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(paths) for paths in lists]))
    return (files, files.where, labels, classes), [
        name for name, paths in zip(classes, lists, strict=True) if not paths
    ]


def _folders(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir() if item.is_dir())


def _list_files(folder: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise error

    found = []
    for top, _, names in os.walk(folder, onerror=refuse, followlinks=True):
        place = Path(top)
        if place.is_symlink() and place.parent.resolve().is_relative_to(place.resolve()):
            raise UserError(
                f"{top} is a link to a folder that contains it, so listing would never end: remove the link"
            )
        found += [(top, name) for name in names if name.lower().endswith(IMG_EXTENSIONS)]
    return [f"{top}{os.sep}{name}" for top, name in sorted(found)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "no folders"


def _random_crop(options: Transform) -> Callable[[Tensor], Tensor]:
    """Return a random resized crop and a flip (He et al. 2016, section 3.4, in torchvision's form), or padded crops."""
    crop: Any = (
        v2.RandomResizedCrop(options.size, scale=options.scale, ratio=options.ratio, antialias=True)
        if options.padding is None
        else v2.RandomCrop(options.size, padding=options.padding, pad_if_needed=True)
    )
    return v2.Compose([crop, v2.RandomHorizontalFlip(options.flip)])  # type: ignore[no-any-return]


class _CentreCrop:
    """Resizes the shorter side and crops the centre."""

    def __init__(self, options: Transform) -> None:
        self.resize = options.resize
        self.crop = v2.Compose([v2.Resize(options.resize, antialias=True), v2.CenterCrop(options.size)])

    def __call__(self, image: Tensor) -> Tensor:
        height, width = image.shape[1:]
        if self.resize**2 * max(height, width) > MAX_PIXELS * min(height, width):  # it would need gigabytes
            raise BrokenImageError(f"{width} × {height} pixels are too narrow to be resized")
        cropped: Tensor = self.crop(image)
        return cropped


def collate(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Make a batch: images (n, 3, size, size), uint8, channels_last, and labels (n,)."""
    images, labels = zip(*samples, strict=True)
    batch = torch.empty(len(images), *images[0].shape, dtype=torch.uint8, memory_format=torch.channels_last)
    return torch.stack(images, out=batch), torch.stack(labels)


def normalised(images: Tensor, options: Transform) -> Tensor:
    """Convert uint8 images to float32 and normalise each channel, on their device: a quarter of the bytes is copied."""
    mean, std = (
        torch.tensor(one, device=images.device).mul(255).view(1, -1, 1, 1) for one in (options.mean, options.std)
    )
    return images.to(torch.float32).sub_(mean).div_(std)
