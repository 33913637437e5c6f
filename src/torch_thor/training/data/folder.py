"""Folders of images, a sub-folder for each class: finding the splits, listing the files, and checking both.

ImageNet-2012 has `train/` and `val/`, or as `ilsvrc/` and `ilsvrc_eval/`; any other image set in that shape is
read alike. Classes are numbered by their sorted folder names and files sorted within them, as
`torchvision.datasets.ImageFolder` does, so that pretrained weights keep their meaning.
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
SHOWN = 3  # names in a message


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
        # One block of bytes: a list of a million strings would be copied into every worker, as each look at a string
        # writes its reference count
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
        """Path of one image below the split's folder.

        Args:
            index: In [0, N).

        Returns:
            The relative path.
        """
        return os.fsdecode(self._bytes[self._ends[index] : self._ends[index + 1]])

    def where(self, index: int) -> str:
        """Path of one image.

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
            f"{error.filename} cannot be listed ({error.strerror}): its images would be missing in silence; make it "
            "readable, or remove it"
        ) from error


def find_splits(root: Path) -> tuple[Path, Path]:
    """Find the training and the evaluation folder.

    Args:
        root: The folder that holds both.

    Returns:
        Training folder, evaluation folder.

    Raises:
        UserError: If `root` holds no pair of them.
    """
    require(root.is_dir(), f"data.root={root} is not a folder: set it to the folder that holds train/ and val/")
    for names in SPLITS:
        train, evaluation = (root / name for name in names)
        if train.is_dir() and evaluation.is_dir():
            return train, evaluation
    pairs = " or ".join(f"{train}/ and {evaluation}/" for train, evaluation in SPLITS)
    found = sorted(item.name for item in root.iterdir() if item.is_dir())
    raise UserError(f"data.root={root} must hold {pairs}, each with a folder for each class; it holds {_some(found)}")


def list_images(folder: Path) -> FolderSource:
    """List one split; no image is opened.

    Args:
        folder: The split's folder.

    Returns:
        Its images; a class may be empty.

    Raises:
        UserError: If there are no class folders, or one holds a link to a folder around it.
    """
    classes = sorted(item.name for item in folder.iterdir() if item.is_dir())
    if not classes:
        flat = any(item.suffix.lower() in IMG_EXTENSIONS for item in folder.iterdir())
        state = "holds its images directly" if flat else "holds no folders"
        raise UserError(f"{folder} {state}: it must hold a folder for each class; sort the images into them")
    paths = [list_files(folder / name) for name in classes]
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(part) for part in paths]))
    names = [os.path.relpath(path, folder) for part in paths for path in part]
    return FolderSource(folder, names, labels, tuple(classes))


@_listing()
def open_folders(root: Path, say: Callable[[str], None]) -> tuple[FolderSource, FolderSource]:
    """List both splits of an image folder and check that they can be trained on.

    Args:
        root: The folder that holds both, see `SPLITS`.
        say: Told, in one line, which evaluation classes are empty.

    Returns:
        Training images, evaluation images: the same classes with the same labels.

    Raises:
        UserError: If a folder cannot be listed, there is one class only, a class has no training image, there is no
            evaluation image, or the class lists differ.
    """
    train, evaluation = (list_images(folder) for folder in find_splits(root))
    _check_same_classes({train.root: train.classes, evaluation.root: evaluation.classes})
    require(
        len(train.classes) > 1,
        f"{train.root} holds one class folder, {train.classes[0]}: training a classifier needs two or more",
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
    """List the evaluation images of an image folder, whose training images need not be there.

    Args:
        root: The folder that holds them, see `SPLITS`.
        say: Told, in one line, which classes are empty.

    Returns:
        The images. Where the folder of the training images exists too, it has the same classes.

    Raises:
        UserError: If there is no evaluation folder, or no image in it.
    """
    require(root.is_dir(), f"data.root={root} is not a folder: set it to the folder that holds val/")
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
    raise UserError(f"data.root={root} must hold {names}, with a folder for each class; it holds {_some(found)}")


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
        "labels are their sorted order, so both must be the same"
    )


def _check_evaluation(evaluation: FolderSource, say: Callable[[str], None]) -> None:
    missing = _empty_classes(evaluation)
    require(len(missing) < len(evaluation.classes), f"{evaluation.root} holds no image: there is nothing to evaluate")
    if missing:
        say(f"{evaluation.root}: no image in {_some(missing)}: accuracy is that of the other classes")


def _empty_classes(source: FolderSource) -> list[str]:
    counts = torch.bincount(source.labels, minlength=len(source.classes)).tolist()
    return [name for name, count in zip(source.classes, counts, strict=True) if count == 0]


def _some(names: Sequence[str]) -> str:
    if not names:
        return "no folders"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
