"""Image folders with a sub-folder for each class: finding the splits, listing the files, and checking both.

ImageNet-2012 has the splits `train/` and `val/`, or `ilsvrc/` and `ilsvrc_eval/`; other image sets with this layout are
read in the same way. Classes are numbered by their sorted folder names, and files are sorted within a class, as in
`torchvision.datasets.ImageFolder`, so that pretrained classifiers can be used.
"""

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from torch_thor.training.data.decoding import decode_rgb
from torch_thor.training.data.image_files import list_files, read_image
from torch_thor.training.errors import UserError, require

SPLITS = (("train", "val"), ("ilsvrc", "ilsvrc_eval"))
SHOWN = 3  # largest number of names in a message


class FolderSource:
    """The images of one split.

    Args:
        root: The split's folder.
        names: Path of each image, relative to `root`.
        labels: (N,), int64.
        classes: Names of the classes.
    """

    def __init__(self, root: Path, names: Sequence[str], labels: Tensor, classes: tuple[str, ...]) -> None:
        self.root, self.labels, self.classes = root, labels, classes
        # one block of bytes: reading a Python string writes its reference count, so every forked worker would copy the
        # memory of a list of a million strings
        encoded = [os.fsencode(name) for name in names]
        self._bytes = b"".join(encoded)
        self._ends = array("q", [0])
        for name in encoded:
            self._ends.append(self._ends[-1] + len(name))

    def load(self, index: int) -> Tensor:
        """Read and decode one image.

        Args:
            index: In [0, N).

        Returns:
            (3, height, width), uint8.

        Raises:
            BrokenImageError: If the file cannot be read or decoded.
        """
        return decode_rgb(read_image(Path(self.where(index))))

    def name(self, index: int) -> str:
        """Return the path of one image, relative to the split's folder.

        Args:
            index: In [0, N).

        Returns:
            The relative path.
        """
        return os.fsdecode(self._bytes[self._ends[index] : self._ends[index + 1]])

    def where(self, index: int) -> str:
        """Return the path of one image.

        Args:
            index: In [0, N).

        Returns:
            The full path.
        """
        return str(self.root / self.name(index))


@contextmanager
def _listing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be listed ({error.strerror}), so its images would be missing: make it readable, "
            "or remove it"
        ) from error


def find_splits(root: Path) -> tuple[Path, Path]:
    """Find the training and the evaluation folder.

    Args:
        root: The folder that contains both.

    Returns:
        The training folder and the evaluation folder.

    Raises:
        UserError: If `root` does not contain such a pair.
    """
    require(root.is_dir(), f"data.root={root} is not a folder: set it to the folder that contains train/ and val/")
    for names in SPLITS:
        train, evaluation = (root / name for name in names)
        if train.is_dir() and evaluation.is_dir():
            return train, evaluation
    pairs = " or ".join(f"{train}/ and {evaluation}/" for train, evaluation in SPLITS)
    found = sorted(item.name for item in root.iterdir() if item.is_dir())
    raise UserError(
        f"data.root={root} must contain {pairs}, each with a folder for each class; it contains {_some(found)}"
    )


def list_images(folder: Path) -> FolderSource:
    """List the images of one split without opening them.

    Args:
        folder: The split's folder.

    Returns:
        Its images; a class may be empty.

    Raises:
        UserError: If there are no class folders, or one contains a link to a folder that contains it.
    """
    classes = sorted(item.name for item in folder.iterdir() if item.is_dir())
    if not classes:
        flat = any(item.suffix.lower() in IMG_EXTENSIONS for item in folder.iterdir())
        state = "contains its images directly" if flat else "contains no folders"
        raise UserError(f"{folder} {state}: it must contain a folder for each class; sort the images into them")
    paths = [list_files(folder / name) for name in classes]
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(part) for part in paths]))
    names = [os.path.relpath(path, folder) for part in paths for path in part]
    return FolderSource(folder, names, labels, tuple(classes))


@_listing()
def open_folders(root: Path, say: Callable[[str], None]) -> tuple[FolderSource, FolderSource]:
    """List both splits of an image folder and check that they can be trained on.

    Args:
        root: The folder that contains both, see `SPLITS`.
        say: Prints a line; it is called if evaluation classes are empty.

    Returns:
        The training images and the evaluation images, which have the same classes with the same labels.

    Raises:
        UserError: If a folder cannot be listed, there is only one class, a class has no training image, there is no
            evaluation image, or the classes differ.
    """
    train, evaluation = (list_images(folder) for folder in find_splits(root))
    _check_same_classes({train.root: train.classes, evaluation.root: evaluation.classes})
    require(
        len(train.classes) > 1,
        f"{train.root} contains only one class folder, {train.classes[0]}: training a classifier needs two or more",
    )
    empty = _empty_classes(train)
    require(
        not empty,
        f"{train.root}: no image in {_some(empty)}: add images ({', '.join(IMG_EXTENSIONS)}) or remove the class "
        f"from {train.root.name}/ and {evaluation.root.name}/",
    )
    _check_evaluation(evaluation, say)
    return train, evaluation


@_listing()
def open_evaluation_folder(root: Path, say: Callable[[str], None]) -> FolderSource:
    """List the evaluation images of an image folder, whose training images need not exist.

    Args:
        root: The folder that contains the evaluation folder, see `SPLITS`.
        say: Prints a line; it is called if classes are empty.

    Returns:
        The images. If the folder of the training images exists too, it has the same classes.

    Raises:
        UserError: If there is no evaluation folder, it contains no image, or the training classes differ.
    """
    require(root.is_dir(), f"data.root={root} is not a folder: set it to the folder that contains val/")
    for train, evaluation in SPLITS:
        if not (root / evaluation).is_dir():
            continue
        source = list_images(root / evaluation)
        if (root / train).is_dir():
            classes = tuple(sorted(item.name for item in (root / train).iterdir() if item.is_dir()))
            _check_same_classes({root / train: classes, source.root: source.classes})
        _check_evaluation(source, say)
        return source
    names = " or ".join(f"{evaluation}/" for _, evaluation in SPLITS)
    found = sorted(item.name for item in root.iterdir() if item.is_dir())
    raise UserError(f"data.root={root} must contain {names}, with a folder for each class; it contains {_some(found)}")


def _check_same_classes(classes: Mapping[Path, Sequence[str]]) -> None:
    (train, own), (evaluation, others) = classes.items()
    if own == others:
        return
    parts = [
        f"{_some(sorted(set(some) - set(rest)))} only in {folder.name}/"
        for folder, some, rest in ((train, own, others), (evaluation, others, own))
        if set(some) - set(rest)
    ]
    raise UserError(
        f"{train.parent}: the class folders of {train.name}/ and {evaluation.name}/ differ ({'; '.join(parts)}): "
        "labels are numbered in their sorted order, so both must have the same classes"
    )


def _check_evaluation(evaluation: FolderSource, say: Callable[[str], None]) -> None:
    missing = _empty_classes(evaluation)
    require(len(missing) < len(evaluation.classes), f"{evaluation.root} contains no image: add the evaluation images")
    if missing:
        say(f"{evaluation.root}: no image in {_some(missing)}: the accuracy is measured on the other classes only")


def _empty_classes(source: FolderSource) -> list[str]:
    counts = torch.bincount(source.labels, minlength=len(source.classes)).tolist()
    return [name for name, count in zip(source.classes, counts, strict=True) if count == 0]


def _some(names: Sequence[str]) -> str:
    if not names:
        return "no folders"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
