"""The small data sets, kept in memory: digits, Fashion-MNIST, and Python's language reference."""

import gzip
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_thor.errors import UserError, first_line, require
from torch_thor.training.data.batches import epoch_order
from torch_thor.training.recipe_model import Data

# Debian's package dataset-fashion-mnist
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
DIGITS_TEST_SHARE = 0.2
CLASSES = {
    "digits": list("0123456789"),
    "fashion-mnist": [
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
        "Ankle boot",
    ],
}  # fmt: skip
SYMBOLS = 128  # ASCII
HELD_OUT = 20  # the last 1/20 of the text is held out

Labelled = tuple[Tensor, Tensor]  # images (N, C, H, W), float32, and labels (N,), int64


def load_images(data: Data) -> tuple[Labelled, Labelled]:
    """Return training and test images, normalised by the training mean and standard deviation.

    Raises:
        UserError: If Fashion-MNIST is missing and cannot be downloaded.
    """
    (train, labels), (test, test_labels) = (
        _digits() if data.name == "digits" else _fashion_mnist(data)
    )
    mean, deviation = train.mean(), train.std()
    return ((train - mean) / deviation, labels.long()), (
        (test - mean) / deviation,
        test_labels.long(),
    )


def _digits() -> tuple[Labelled, Labelled]:
    from sklearn.datasets import load_digits  # slow to import, and needed for this data set only

    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8)
    # the split does not depend on the seed of the run
    order = epoch_order(len(images), seed=0, epoch=0)
    cut = round(len(images) * DIGITS_TEST_SHARE)
    train, test = order[cut:], order[:cut]
    return (images[train], labels[train]), (images[test], labels[test])


def _fashion_mnist(data: Data) -> tuple[Labelled, Labelled]:
    folder = DEBIAN_FASHION_MNIST if data.root is None else data.folder()
    if (folder / "train-images-idx3-ubyte.gz").is_file():
        sets = [
            [
                read_idx(folder / f"{part}-{kind}-ubyte.gz")
                for kind in ("images-idx3", "labels-idx1")
            ]
            for part in ("train", "t10k")
        ]
    else:
        from torchvision.datasets import FashionMNIST  # slow to import

        sets = [[part.data, part.targets] for part in downloaded(FashionMNIST, data)]
    train, test = ((images.float().div_(255).unsqueeze(1), labels) for images, labels in sets)
    return train, test


def downloaded(kind: Callable[..., Any], data: Data) -> list[Any]:
    """Return the training and the test set of a class of torchvision, downloaded if need be.

    Raises:
        UserError: If they are missing and cannot be downloaded, or `data.root` does not exist.
    """
    root = data.folder()
    require(
        data.root is None or root.is_dir(),
        f"data.root={data.root} is not a folder: correct it, or make the folder first",
    )
    try:
        return [kind(str(root), train=train, download=data.download) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"{data.name} is missing or incomplete in {root} ({first_line(error)}): set data.root "
            "to its folder, or set data.download=true and check the network"
        ) from error


def read_idx(path: Path) -> Tensor:
    """Return the content of a compressed MNIST-format file of bytes, in the shape of its header."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape))
    return torch.from_numpy(values.reshape(shape).copy())


def python_text() -> str:
    """Return the language reference that is part of Python, in ASCII, with each paragraph once.

    Each Python version has another text, so losses are comparable within one version only.
    """
    topics = pydoc_data.topics.topics
    text = "\n\n".join(
        dict.fromkeys(part for name in sorted(topics) for part in topics[name].split("\n\n"))
    )
    return "".join(character for character in text if ord(character) < SYMBOLS)


def load_characters() -> tuple[Tensor, Tensor]:
    """Return that text's training and held-out parts as int64 character codes in [0, SYMBOLS)."""
    codes = torch.tensor(list(python_text().encode()), dtype=torch.long)
    cut = len(codes) * (HELD_OUT - 1) // HELD_OUT
    return codes[:cut], codes[cut:]
