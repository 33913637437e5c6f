"""Image sets that are cropped: CIFAR, and folders with a folder for each class, such as ImageNet.

Classes are numbered by their sorted folder names, and files are sorted within a class, as in
torchvision's `ImageFolder`, so that pretrained classifiers can be used. `ImageFolder` itself leaves
out folders that cannot be read, and knows fewer formats. A file with the suffix of a format that
Pillow decodes counts as an image without being opened, so that a million files are listed quickly;
every other file is an image if Pillow knows its content.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unicodedata import is_normalized
from unicodedata import normalize as normalize_text

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import normalize

from torch_thor.errors import explaining, first_line, require
from torch_thor.training.data.batches import digest
from torch_thor.training.data.decoding import (
    BrokenImageError,
    decode_rgb,
    image_suffixes,
    is_image,
    read_image,
)
from torch_thor.training.data.listing import LeftOut, files_in, refuse_a_link_to_nothing
from torch_thor.training.recipe_model import FOLDER, Data, Transform

SPLITS = (("train", "val"), ("train", "test"), ("ilsvrc", "ilsvrc_eval"))  # the first that is there


class Images(Dataset[Any]):
    """Cropped uint8 images, (3, size, size), and labels by key (epoch, index), or a fault's text.

    Args:
        source: Images (3, height, width), uint8, by index.
        labels: (N,), int64.
        classes: The names of the classes.
        crop: Crops an image.
        seed: The seed of the run. Random crops are functions of it and of the key.
    """

    def __init__(
        self,
        source: Any,
        labels: Tensor,
        classes: Sequence[str],
        crop: Callable[[Tensor], Tensor],
        seed: int,
    ) -> None:
        self.source, self.labels, self.classes, self.crop, self.seed = (
            source,
            labels,
            classes,
            crop,
            seed,
        )

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
            return f"{self.source.where(index)} cannot be read ({error})"


class Files:
    """The decoded image files of a folder, by index."""

    def __init__(self, paths: Sequence[str]) -> None:
        # one block of bytes: reading a Python string writes its reference count, so every forked
        # worker would copy the memory of a list of a million strings
        self.paths = np.array([os.fsencode(path) for path in paths])

    def where(self, index: int) -> Path:
        """Return the path of an image."""
        return Path(os.fsdecode(self.paths[index]))

    def __getitem__(self, index: int) -> Tensor:
        image = decode_rgb(read_image(self.where(index)))
        height, width = image.shape[1:]
        # resizing its shorter side could need gigabytes
        if max(height, width) > 100 * min(height, width):
            raise BrokenImageError(f"{width} × {height} pixels are too narrow")
        return image


def open_images(
    data: Data, seed: int, *, train: bool = True, say: Callable[[str], None] = print
) -> tuple[Images | None, Images]:
    """Return a data set's checked training images (None unless asked for) and evaluation images.

    Args:
        data: The data set.
        seed: The seed of the run.
        train: Whether the training images are needed.
        say: Prints a line; it is called for each folder of which files are left out.

    Raises:
        UserError: If the images are missing or unsuitable.
    """
    options = data.crops
    training, held_out = (
        _open_folders(data, train, say) if data.name == FOLDER else _open_cifar(data)
    )
    # He et al. 2016, section 3.4, in torchvision's form
    crop: Any = (
        v2.RandomResizedCrop(options.size, scale=options.scale, ratio=options.ratio, antialias=True)
        if options.padding is None
        else v2.RandomCrop(options.size, padding=options.padding, pad_if_needed=True)
    )
    crop = v2.Compose([crop, v2.RandomHorizontalFlip(options.flip)])
    centre = v2.Compose([v2.Resize(options.resize, antialias=True), v2.CenterCrop(options.size)])
    return None if training is None else Images(*training, crop, seed), Images(
        *held_out, centre, seed
    )


_Part = tuple[Any, Tensor, Sequence[str]]  # the first arguments of `Images`


def _open_cifar(data: Data) -> tuple[_Part, _Part]:
    kind: type[CIFAR10] = {"cifar10": CIFAR10, "cifar100": CIFAR100}[data.name]
    root = data.folder()
    remedy = "check the network" if data.download else "set data.download=true"
    with explaining(
        (RuntimeError, OSError),
        lambda error: (
            f"{data.name} is missing or incomplete in {root / kind.base_folder} "
            f"({first_line(error).removesuffix('.')}): {remedy}, or unpack the archive there"
        ),
    ):
        train, test = (
            kind(str(root), train=train, download=data.download) for train in (True, False)
        )

    def part(images: CIFAR10) -> _Part:
        return (
            torch.from_numpy(images.data).permute(0, 3, 1, 2),
            torch.tensor(images.targets),
            images.classes,
        )

    return part(train), part(test)


def _open_folders(
    data: Data, train: bool, say: Callable[[str], None]
) -> tuple[_Part | None, _Part]:
    require(
        data.root is not None,
        f"data.root is not set: {FOLDER} needs the folder that contains train/ and val/; give it "
        "as data.root=FOLDER",
    )
    pairs = [[data.folder() / name for name in names] for names in SPLITS]
    for folder in (folder for pair in pairs for folder in pair):
        refuse_a_link_to_nothing(folder, "images")
    folders = next(
        (pair for pair in pairs if pair[1].is_dir() and (pair[0].is_dir() or not train)), []
    )
    require(
        folders != [],
        f"data.root={data.folder()} must contain "
        f"{' or '.join(' and '.join(names) for names in SPLITS)}, each with a folder for each "
        "class: choose another folder, or sort the images into them",
    )
    with _listing(data.folder()):
        present = [(folder, LeftOut()) for folder in folders if folder.is_dir()]
        classes = [_classes(folder, left) for folder, left in present]
        different = sorted(set(classes[0]) ^ set(classes[-1]))
        require(
            not different,
            f"{data.folder()}: only one of {folders[0].name} and {folders[1].name} has the class "
            f"folders {_some(_told_apart(different))}: labels are numbered in their sorted order, "
            "so both must have the same classes",
        )
        used = present if train else present[-1:]
        parts = [_list(folder, classes[0], left, say) for folder, left in used]
    return parts[0] if train else None, parts[-1]


def _listing(folder: Path) -> AbstractContextManager[None]:
    return explaining(
        OSError,
        lambda error: (
            f"{error.filename or folder} cannot be listed ({error.strerror}), so its images would "
            "be missing: repair or remove it"
        ),
    )


def list_images(folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Return the images anywhere in a folder, sorted, and say what is left out.

    Raises:
        UserError: If a folder in it cannot be listed.
    """
    left = LeftOut()
    with _listing(folder):
        paths = _list_files(folder, left)
    left.tell(folder, "images", say)
    return sorted(map(Path, paths))


def _classes(folder: Path, left: LeftOut) -> list[str]:
    """Return the sorted names of the class folders."""
    names = []
    for item in folder.iterdir():
        if left.keeps(item.name):
            refuse_a_link_to_nothing(item, "images")
            if item.is_dir():
                names.append(item.name)
            else:
                left.others["beside the class folders"] += 1
    return sorted(names)


def _list(folder: Path, classes: Sequence[str], left: LeftOut, say: Callable[[str], None]) -> _Part:
    require(
        len(classes) > 1,
        f"{folder} must contain a folder for each of two or more classes: sort the images into "
        "them",
    )
    lists = [_list_files(folder / name, left) for name in classes]
    left.tell(folder, "images", say)
    empty = [name for name, paths in zip(classes, lists, strict=True) if not paths]
    require(
        not empty,
        f"{folder}: no image in {_some(empty)}: add images of a format that Pillow reads (JPEG, "
        "PNG, WebP, TIFF, ...), or remove the class from both folders",
    )
    labels = torch.arange(len(classes)).repeat_interleave(
        torch.tensor([len(paths) for paths in lists])
    )
    return Files([path for paths in lists for path in paths]), labels, classes


def _list_files(folder: Path, left: LeftOut | None = None) -> list[str]:
    """Return the paths of the images in a folder, sorted; counts in `left` what is none."""
    return list(files_in(folder, left or LeftOut(), _holds_an_image))


def _holds_an_image(top: str, name: str) -> bool | None:
    if name.lower().endswith(image_suffixes()):
        return True  # or what is broken, which reading it will tell
    path = Path(top, name)
    refuse_a_link_to_nothing(path, "images")
    # opening a pipe waits for its writer
    return (path.is_file() and is_image(path)) or None


def _told_apart(names: Sequence[str]) -> list[str]:
    """Say how accents are encoded in names that look the same, and sort these side by side."""
    shown = {name: normalize_text("NFC", name) for name in names}
    often = Counter(shown.values())
    return [
        f"{name} ({_encoding(name)})" if often[shown[name]] > 1 else name
        for name in sorted(names, key=lambda name: (shown[name], name))
    ]


def _encoding(name: str) -> str:
    forms = [form for form in ("NFC", "NFD") if is_normalized(form, name)]
    return f"Unicode form {forms[0]}" if forms else "neither Unicode form NFC nor NFD"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
    scaled: Tensor = normalize(images.float(), mean, std, inplace=True)
    return scaled
