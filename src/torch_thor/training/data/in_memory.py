"""The small data sets, which are kept in memory as tensors and need no worker processes.

Images are float32, (N, channels, height, width), normalised by the mean and standard deviation of the training images.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import torch
from torch import Tensor

from torch_thor.training.config.data_spec import DataSpec
from torch_thor.training.data.shards import EvaluationOrder, Shard, TrainingOrder, WholeBatches, epoch_order
from torch_thor.training.data.stream import BatchLoader, MemoryLoader, Streams, TrainingStream
from torch_thor.training.errors import UserError, first_line, require

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
DIGITS_TEST_SHARE = 0.2
EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class DataBundle:
    """A data set in memory.

    Args:
        train_images: (N, C, H, W), float32.
        train_labels: (N,), int64.
        test_images: (M, C, H, W), float32.
        test_labels: (M,), int64.
        classes: Number of classes.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image."""
        return tuple(self.train_images.shape[1:])

    @property
    def device(self) -> torch.device:
        """The device that the images are on."""
        return self.train_images.device

    def to(self, device: torch.device) -> "DataBundle":
        """Return the same data on another device.

        Args:
            device: Where to put it.

        Returns:
            A bundle whose tensors are on `device`.
        """
        moved = [t.to(device) for t in (self.train_images, self.train_labels, self.test_images, self.test_labels)]
        return DataBundle(moved[0], moved[1], moved[2], moved[3], self.classes)

    def open(self, *, batch_size: int, seed: int, shard: Shard) -> Streams:
        """Open the images at the beginning of a training.

        Args:
            batch_size: Images per step, on all ranks together.
            seed: Determines, with the epoch's number, the order.
            shard: Rank and number of ranks.

        Returns:
            Training batches and evaluation batches.
        """
        order = TrainingOrder(len(self.train_labels), batch_size, seed, shard)
        evaluation = EvaluationOrder(len(self.test_labels), EVALUATION_BATCH, shard)
        return Streams(
            TrainingStream(MemoryLoader((self.train_images, self.train_labels), order), order),
            MemoryLoader((self.test_images, self.test_labels), evaluation),
        )

    def open_evaluation(self, *, batch_size: int, shard: Shard) -> BatchLoader:
        """Open the test images only.

        Args:
            batch_size: Not used: batches are those of the evaluations during training.
            shard: Rank and number of ranks.

        Returns:
            The rank's batches.
        """
        order = WholeBatches(len(self.test_labels), EVALUATION_BATCH, shard)
        return MemoryLoader((self.test_images, self.test_labels), order)


def load_data(spec: DataSpec) -> DataBundle:
    """Load a data set into memory.

    Args:
        spec: The data set, and its folder.

    Returns:
        The normalised images with their labels.

    Raises:
        UserError: If the files are missing or damaged and cannot be downloaded.
    """
    return LOADERS[spec.name](spec)


def _normalised(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> DataBundle:
    mean, deviation = train.mean(), train.std()
    classes = int(train_labels.max()) + 1
    return DataBundle(
        (train - mean) / deviation,
        train_labels.long(),
        (test - mean) / deviation,
        test_labels.long(),
        classes,
    )


def _load_digits(spec: DataSpec) -> DataBundle:
    from sklearn.datasets import load_digits  # slow to import, and needed for this data set only

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target)
    order = epoch_order(len(images), seed=0, epoch=0)  # the split does not depend on the run's seed
    cut = round(len(images) * DIGITS_TEST_SHARE)
    test, train = order[:cut], order[cut:]
    return _normalised(images[train], labels[train], images[test], labels[test])


def _load_fashion_mnist(spec: DataSpec) -> DataBundle:
    folder = _find_fashion_mnist(spec)
    parts = [
        read_idx(folder, f"{part}-{kind}")
        for part in ("train", "t10k")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    train, train_labels, test, test_labels = parts
    return _normalised(
        train.float().div_(255).unsqueeze(1), train_labels, test.float().div_(255).unsqueeze(1), test_labels
    )


def _find_fashion_mnist(spec: DataSpec) -> Path:
    # the user's folder, that of Debian's package, or a download by torchvision
    root = spec.folder()
    places = [root, root / "FashionMNIST" / "raw"]
    if spec.root is None:
        places.append(DEBIAN_FASHION_MNIST)
    for place in places:
        if any((place / f"train-images-idx3-ubyte{ending}").is_file() for ending in ("", ".gz")):
            return place
    looked = ", ".join(str(place) for place in places)
    require(
        spec.download,
        f"Fashion-MNIST is not in {looked}: set data.root to the folder that contains its four files, "
        "or data.download=true, or install Debian's package dataset-fashion-mnist",
    )
    from torchvision.datasets import FashionMNIST  # slow to import, and needed for a download only

    try:
        FashionMNIST(str(root), train=True, download=True)
    except (RuntimeError, URLError, OSError) as error:
        raise UserError(
            f"Fashion-MNIST is not in {looked} and could not be downloaded ({first_line(error)}): "
            "check the network, or set data.root to the folder that contains its four files"
        ) from error
    return root / "FashionMNIST" / "raw"


def read_idx(folder: Path, name: str) -> Tensor:
    """Read one file of the MNIST format, plain or gzipped, without unpacking it to disk.

    Args:
        folder: The folder of the file.
        name: Its name, without `.gz`.

    Returns:
        Its values, uint8, in the shape that its header gives.

    Raises:
        UserError: If the file is missing or damaged.
    """
    path = folder / name if (folder / name).is_file() else folder / f"{name}.gz"
    try:
        content = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read ({error}): fetch the data set again, or choose another data.root"
        ) from error
    kind, rank = content[2:3], content[3] if len(content) > 3 else 0
    header = 4 + 4 * rank
    shape = struct.unpack(f">{rank}I", content[4:header]) if len(content) >= header else ()
    require(
        content[:2] == b"\0\0" and kind == b"\x08" and rank > 0 and len(content) == header + math.prod(shape or (0,)),
        f"{path} is not a complete idx file of bytes: fetch the data set again, or choose another data.root",
    )
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).view(shape)


LOADERS: dict[str, Callable[[DataSpec], DataBundle]] = {
    "digits": _load_digits,
    "fashion-mnist": _load_fashion_mnist,
}
