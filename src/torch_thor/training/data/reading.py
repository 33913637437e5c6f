"""Reading and cropping batches of images in worker processes."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from torch_thor.training.config.data_spec import Workers
from torch_thor.training.data.decoding import BrokenImageError
from torch_thor.training.data.image_source import ImageSource
from torch_thor.training.data.workers import MORE_SHARED_MEMORY, DeathWatch, start_worker
from torch_thor.training.errors import UserError

Key = tuple[int, int]  # epoch, number of the image: all that a worker must be told


class Crop(Protocol):
    """From an image of any size to one of the network's."""

    size: int

    def __call__(self, image: Tensor, epoch: int, index: int) -> Tensor:
        """Crop one image.

        Args:
            image: (3, height, width), uint8.
            epoch: Number of the epoch, from 0.
            index: The image's number in its set.

        Returns:
            (3, size, size), uint8.
        """
        ...


class RawBatch(NamedTuple):
    """A batch as it leaves a worker.

    Attributes:
        images: (n, 3, size, size), uint8, channels_last.
        labels: (n,), int64.
        broken: Number and reason of each image that was asked for and is not there.
    """

    images: Tensor
    labels: Tensor
    broken: tuple[tuple[int, str], ...]


class Reader(Dataset[RawBatch]):
    """Reads a whole batch at a time, so that a broken image can be left out of it.

    Args:
        source: The images.
        crop: What is done to each.
    """

    def __init__(self, source: ImageSource, crop: Crop) -> None:
        self.source, self.crop = source, crop

    def __getitems__(self, keys: list[Key]) -> RawBatch | UserError:  # the name that DataLoader looks for
        try:
            batch = self._read(keys)
            return batch if get_worker_info() is None else _shared(batch)
        except UserError as error:
            return error  # not raised: a DataLoader would raise it anew with the worker's traceback as its message

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
                    f"there is no memory to read {self.source.where(index)}: use fewer data.workers.count, then go on "
                    "with --resume"
                ) from error
            kept.append(index)
        return RawBatch(images[: len(kept)], self.source.labels[kept], tuple(broken))


class RawLoader:
    """Batches from worker processes that stay alive from one iteration to the next.

    Args:
        loader: Gives the answers of a `Reader`.
    """

    def __init__(self, loader: DataLoader[RawBatch]) -> None:
        self.loader, self.watch = loader, DeathWatch()

    def __iter__(self) -> Iterator[RawBatch]:
        """Read on.

        Yields:
            Batches.

        Raises:
            UserError: If the machine is at fault and not an image: no memory, a worker killed.
        """
        answers: Iterator[RawBatch | UserError] = self.watch.start(self.loader)
        while True:
            with self.watch.waiting():
                answer = next(answers, None)
            if answer is None:
                return
            if isinstance(answer, UserError):
                raise answer
            yield answer


def raw_loader(
    source: ImageSource, crop: Crop, batches: Iterable[list[Key]], workers: Workers, *, pin_memory: bool = False
) -> RawLoader:
    """Read batches in worker processes.

    Args:
        source: The images.
        crop: What is done to each.
        batches: Asked for its keys anew in each iteration.
        workers: The processes.
        pin_memory: Whether batches are in page-locked memory, from which a GPU copies them while it computes.

    Returns:
        An iterable of `RawBatch`.
    """
    several = workers.count > 0
    loader = _Loader(
        Reader(source, crop),
        batch_sampler=batches,  # keys in the place of indices: the reader knows them
        collate_fn=_as_it_is,
        num_workers=workers.count,
        prefetch_factor=workers.prefetch if several else None,
        persistent_workers=several,
        pin_memory=pin_memory,
        worker_init_fn=start_worker if several else None,
        # a DataLoader draws a number for each iteration; out of torch's global ones it would be another number of them
        # after resuming in the middle of an epoch, and other dropout from there on
        generator=torch.Generator(),
    )
    return RawLoader(loader)


class _Loader(DataLoader[RawBatch]):
    def check_worker_number_rationality(self) -> None:
        pass  # `check_workers` has said it, once and for all processes


def _as_it_is(batch: Any) -> Any:
    return batch


def _shared(batch: RawBatch) -> RawBatch:
    # Here and not where torch would do it, in a thread that loses what cannot be shared: training would wait for ever.
    try:
        for tensor in (batch.images, batch.labels):
            tensor.share_memory_()
    except RuntimeError as error:
        size, reason = batch.images.untyped_storage().nbytes() / 1e6, str(error).rpartition(">: ")[2]
        raise UserError(
            f"there is no shared memory for a batch of {size:.1f} MB ({reason}): {MORE_SHARED_MEMORY}; then go on with "
            "--resume"
        ) from error
    return batch
