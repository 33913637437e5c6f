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

Key = tuple[int, int]  # epoch and index of an image: the whole input of a worker


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
            return batch if get_worker_info() is None else _shared(batch)
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


class RawLoader:
    """Batches from worker processes that stay alive between iterations.

    Args:
        loader: A loader whose data set is a `Reader`.
    """

    def __init__(self, loader: DataLoader[RawBatch]) -> None:
        self.loader, self.watch = loader, DeathWatch()

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield batches.

        Yields:
            The batches of one iteration.

        Raises:
            UserError: If memory is exhausted or a worker has died.
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
        crop: The transform of each image.
        batches: The keys of each batch; they are read anew in each iteration.
        workers: The processes.
        pin_memory: Whether batches are in page-locked memory, so that a GPU can copy them while it computes.

    Returns:
        An iterable of `RawBatch`.
    """
    several = workers.count > 0
    loader = _Loader(
        Reader(source, crop),
        batch_sampler=batches,  # the reader expects keys instead of indices
        collate_fn=_as_it_is,
        num_workers=workers.count,
        prefetch_factor=workers.prefetch if several else None,
        persistent_workers=several,
        pin_memory=pin_memory,
        worker_init_fn=start_worker if several else None,
        # a DataLoader draws a random number for each iteration; with its own generator it does not advance the global
        # one, so that dropout is the same after resuming in the middle of an epoch
        generator=torch.Generator(),
    )
    return RawLoader(loader)


class _Loader(DataLoader[RawBatch]):
    def check_worker_number_rationality(self) -> None:
        pass  # `check_workers` warns once for all processes


def _as_it_is(batch: Any) -> Any:
    return batch


def _shared(batch: RawBatch) -> RawBatch:
    # Here, because torch would do it in a thread that drops a batch that cannot be shared: training would wait forever.
    try:
        for tensor in (batch.images, batch.labels):
            tensor.share_memory_()
    except RuntimeError as error:
        size, reason = batch.images.untyped_storage().nbytes() / 1e6, str(error).rpartition(">: ")[2]
        raise UserError(
            f"there is no shared memory for a batch of {size:.1f} MB ({reason}): {MORE_SHARED_MEMORY}; then continue "
            "with --resume"
        ) from error
    return batch
