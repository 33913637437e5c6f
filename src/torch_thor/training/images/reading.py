"""Reading and cropping batches of images in worker processes."""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_thor.training.data_spec import Workers
from torch_thor.training.images.decoding import BrokenImageError
from torch_thor.training.images.source import ImageSource

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

    def __getitems__(self, keys: list[Key]) -> RawBatch:  # the name that DataLoader looks for
        size = self.crop.size
        images = torch.empty(len(keys), 3, size, size, dtype=torch.uint8, memory_format=torch.channels_last)
        kept: list[int] = []
        broken: list[tuple[int, str]] = []
        for epoch, index in keys:
            try:
                image = self.source.load(index)
            except BrokenImageError as error:
                broken.append((index, str(error)))
                continue
            images[len(kept)] = self.crop(image, epoch, index)
            kept.append(index)
        return RawBatch(images[: len(kept)], self.source.labels[kept], tuple(broken))


class _Loader(DataLoader[RawBatch]):
    def check_worker_number_rationality(self) -> None:
        pass  # `check_workers` has said it, once and for all processes


def raw_loader(
    source: ImageSource, crop: Crop, batches: Iterable[list[Key]], workers: Workers, *, pin_memory: bool = False
) -> DataLoader[RawBatch]:
    """Read batches in worker processes that stay alive from one iteration to the next.

    Args:
        source: The images.
        crop: What is done to each.
        batches: Asked for its keys anew in each iteration.
        workers: The processes.
        pin_memory: Whether batches lie in page-locked memory, from where a GPU fetches them while it computes.

    Returns:
        An iterable of `RawBatch`.
    """
    several = workers.count > 0
    return _Loader(
        Reader(source, crop),
        batch_sampler=batches,  # keys in the place of indices: the reader knows them
        collate_fn=_as_it_is,
        num_workers=workers.count,
        prefetch_factor=workers.prefetch if several else None,
        persistent_workers=several,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker if several else None,
        # a DataLoader draws a number for each iteration; out of torch's global ones it would be another number of them
        # after resuming in the middle of an epoch, and other dropout from there on
        generator=torch.Generator(),
    )


def check_workers(workers: Workers, processes: int, say: Callable[[str], None]) -> None:
    """Warn where there are more workers than cores.

    Args:
        workers: Of each training process.
        processes: Training processes on this machine.
        say: Told, in one line.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = workers.count * processes
    if total > cores:
        each = f"workers={workers.count}" + (f" on each of {processes} processes" if processes > 1 else "")
        say(f"{each}: {total} worker processes share {cores} cores; {cores // processes} or fewer would do")


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    # What to do when a signal asks to stop is the training process's business, and a checkpoint needs its workers
    # alive: without them the next batch is an error. Ctrl-C reaches every process of a terminal; `torchrun`, `timeout`
    # and the schedulers of clusters send SIGTERM to all processes of a job.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # it tells who sent the signal; macOS has none
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told_by, args=(os.getppid(),), daemon=True).start()


def _end_when_told_by(training_process: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != training_process:
        pass
    os._exit(0)  # as torch's own handler does: it is how a loader ends a worker that does not listen
