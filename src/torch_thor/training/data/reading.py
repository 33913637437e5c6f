"""Reading and cropping batches of images in worker processes."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from torch_thor.training.config.data_spec import Workers
from torch_thor.training.data.decoding import BrokenImageError
from torch_thor.training.data.image_source import ImageSource
from torch_thor.training.data.worker_loader import Key, WorkerLoader, shared, worker_loader
from torch_thor.training.errors import UserError


class Crop(Protocol):
    """Crops an image of any size to the input size of the network."""

    size: int

    def __call__(self, image: Tensor, epoch: int, index: int) -> Tensor:
        """Crop one image.

        Args:
            image: (3, height, width), uint8.
            epoch: Number of the epoch, from 0.
            index: The image's index in its data set.

        Returns:
            (3, size, size), uint8.
        """
        ...


class RawBatch(NamedTuple):
    """A batch as a worker returns it.

    Attributes:
        images: (n, 3, size, size), uint8, channels_last.
        labels: (n,), int64.
        broken: Index and reason of each image that could not be read and is missing in the batch.
    """

    images: Tensor
    labels: Tensor
    broken: tuple[tuple[int, str], ...]


class Reader(Dataset[RawBatch]):
    """Reads all images of a batch at once, so that broken ones can be left out.

    Args:
        source: The images.
        crop: The transform of each image.
    """

    def __init__(self, source: ImageSource, crop: Crop) -> None:
        self.source, self.crop = source, crop

    def __getitems__(self, keys: list[Key]) -> RawBatch | UserError:  # DataLoader looks for this name
        try:
            batch = self._read(keys)
            return batch if get_worker_info() is None else shared(batch)
        except UserError as error:
            return error  # not raised, because DataLoader would replace its message by the worker's traceback

    def _read(self, keys: list[Key]) -> RawBatch:
        size = self.crop.size
        images = torch.empty(len(keys), 3, size, size, dtype=torch.uint8, memory_format=torch.channels_last)
        kept: list[int] = []
        broken: list[tuple[int, str]] = []
        for epoch, index in keys:
            try:
                images[len(kept)] = self.crop(self.source.load(index), epoch, index)
            except BrokenImageError as error:
                broken.append((index, str(error)))
                continue
            except MemoryError as error:
                raise UserError(
                    f"there is no memory to read {self.source.where(index)}: use a smaller data.workers.count, then "
                    "continue with --resume"
                ) from error
            kept.append(index)
        return RawBatch(images[: len(kept)], self.source.labels[kept], tuple(broken))


def raw_loader(
    source: ImageSource, crop: Crop, batches: Iterable[list[Key]], workers: Workers, *, pin_memory: bool = False
) -> WorkerLoader[RawBatch]:
    """Read batches in worker processes.

    Args:
        source: The images.
        crop: The transform of each image.
        batches: The keys of each batch; they are read anew in each iteration.
        workers: The processes.
        pin_memory: Whether batches are in page-locked memory, so that a GPU can copy them while it computes.

    Returns:
        An iterable of `RawBatch`.
    """
    return worker_loader(Reader(source, crop), batches, workers, pin_memory=pin_memory)
