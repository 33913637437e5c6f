"""The small data sets, kept in memory: digits, Fashion-MNIST, and Python's language reference."""

import gzip
import pydoc_data.topics
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torch_thor.errors import explaining, first_line, require
from torch_thor.training.data.batches import epoch_order
from torch_thor.training.recipe_model import Data

# Debian's package dataset-fashion-mnist
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
DIGITS_TEST_SHARE = 0.2
SYMBOLS = 128  # ASCII
HELD_OUT = 20  # the last 1/20 of the text is held out

Labelled = tuple[Tensor, Tensor]  # images (N, C, H, W), float32, and labels (N,), int64


def load_images(data: Data) -> tuple[Labelled, Labelled]:
    """Return training and test images, normalised by the training mean and standard deviation.

    Raises:
        UserError: If the files are missing or damaged and cannot be downloaded.
    """
    (train, labels), test = _digits() if data.name == "digits" else _fashion_mnist(data)
    mean, deviation = train.mean(), train.std()
    return ((train - mean) / deviation, labels.long()), (
        (test[0] - mean) / deviation,
        test[1].long(),
    )


def _digits() -> tuple[Labelled, Labelled]:
    from sklearn.datasets import load_digits  # slow to import, and needed for this data set only

    digits = load_digits()
    images, labels = (
        torch.from_numpy(digits.images).float().unsqueeze(1),
        torch.from_numpy(digits.target),
    )
    # the split does not depend on the seed of the run
    order = epoch_order(len(images), seed=0, epoch=0)
    cut = round(len(images) * DIGITS_TEST_SHARE)
    return (images[order[cut:]], labels[order[cut:]]), (images[order[:cut]], labels[order[:cut]])


def _fashion_mnist(data: Data) -> tuple[Labelled, Labelled]:
    root, parts = data.folder(), []
    places = [
        root,
        root / "FashionMNIST/raw",
        *([DEBIAN_FASHION_MNIST] if data.root is None else []),
    ]
    folder = next(
        (place for place in places if (place / "train-images-idx3-ubyte.gz").is_file()), None
    )
    if folder is None:
        # slow to import, and needed for a download only
        from torchvision.datasets import FashionMNIST

        folder = places[1]
        with explaining(
            (RuntimeError, OSError),
            lambda error: (
                f"Fashion-MNIST is not in {', '.join(map(str, places))} ({first_line(error)}): set "
                "data.root to the folder of its four files (.gz), install Debian's package "
                "dataset-fashion-mnist, or set data.download=true and check the network"
            ),
        ):
            FashionMNIST(str(root), download=data.download)
    for name in ("train", "t10k"):
        images, labels = (
            read_idx(folder / f"{name}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1")
        )
        parts.append((images.float().div_(255).unsqueeze(1), labels))
    return parts[0], parts[1]


def read_idx(path: Path) -> Tensor:
    """Return the content of a compressed MNIST-format file of bytes, in the shape of its header.

    Raises:
        UserError: If the file is missing or damaged.
    """
    with explaining(
        (OSError, EOFError, zlib.error, ValueError, IndexError),
        lambda error: (
            f"{path} cannot be read ({error}): fetch the data set again, or choose another "
            "data.root"
        ),
    ):
        content = gzip.decompress(path.read_bytes())
        require(
            content[:3] == b"\0\0\x08" and content[3] > 0,
            "it does not begin as an idx file of bytes",
        )
        shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(
            shape.astype(int)
        )
    return torch.from_numpy(values.copy())


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
