"""Batches of images or text that worker processes create from keys."""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from torch_thor.torch_internals import tree_leaves
from torch_thor.training.config.data_spec import Workers
from torch_thor.training.data.shards import BatchOrder
from torch_thor.training.data.workers import MORE_SHARED_MEMORY, DeathWatch, start_worker
from torch_thor.training.errors import UserError

Key = tuple[int, int]  # epoch and index of the sample: all that a worker needs to create it
Made = TypeVar("Made")


class Keys:
    """The keys of the batches of an epoch.

    `epoch` is read once, when an iteration starts, because workers read ahead of the current position.

    Args:
        order: The samples of each batch.
    """

    def __init__(self, order: BatchOrder) -> None:
        self.order = order
        self.epoch = self.start = 0

    def __len__(self) -> int:
        """Return the number of remaining batches of the epoch."""
        return self.order.batches - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        return ([(epoch, index) for index in batch] for batch in self.order.epoch(epoch, self.start))


class WorkerLoader(Generic[Made]):
    """Batches from worker processes that stay alive from one iteration to the next.

    Args:
        loader: The loader, which yields batches. It yields an error instead of a batch that could not be created.
    """

    def __init__(self, loader: DataLoader[Made]) -> None:
        self.loader, self.watch = loader, DeathWatch()

    def __iter__(self) -> Iterator[Made]:
        """Yield the batches of one iteration of the loader.

        Yields:
            Batches.

        Raises:
            UserError: If the machine, not a sample, causes a failure, such as exhausted memory or a killed worker.
        """
        answers: Iterator[Made | UserError] = self.watch.start(self.loader)
        while True:
            with self.watch.waiting():
                answer = next(answers, None)
            if answer is None:
                return
            if isinstance(answer, UserError):
                raise answer
            yield answer


def worker_loader(
    reader: Dataset[Made], batches: Iterable[list[Key]], workers: Workers, *, pin_memory: bool = False
) -> WorkerLoader[Made]:
    """Create a loader whose batches are created in worker processes.

    Args:
        reader: Its `__getitems__` creates a batch from a list of keys, or returns a `UserError`, which is raised here.
        batches: The keys of each batch. It is iterated over once in each iteration of the loader.
        workers: The settings of the worker processes.
        pin_memory: Whether batches are in page-locked memory, from which they are copied to a GPU while it computes.

    Returns:
        An iterable of the batches that the reader creates.
    """
    several = workers.count > 0
    loader = _Loader(
        reader,
        batch_sampler=batches,  # keys instead of indices, which the reader accepts
        collate_fn=_as_it_is,
        num_workers=workers.count,
        prefetch_factor=workers.prefetch if several else None,
        persistent_workers=several,
        pin_memory=pin_memory,
        worker_init_fn=start_worker if several else None,
        # a DataLoader draws one random number per iteration; drawn from torch's global generator, it would change the
        # dropout after resuming in the middle of an epoch, because the number of iterations is then different
        generator=torch.Generator(),
    )
    return WorkerLoader(loader)


class _Loader(DataLoader[Made]):
    def check_worker_number_rationality(self) -> None:
        pass  # `check_workers` has already printed the warning, once for all processes


def _as_it_is(batch: Any) -> Any:
    return batch


def shared(batch: Made) -> Made:
    """Move a batch to shared memory. It is called in a worker.

    Torch would do this later, in a thread that drops a batch which cannot be shared, and training would wait forever.

    Args:
        batch: A tree; some of its leaves are tensors.

    Returns:
        The batch.

    Raises:
        UserError: If there is not enough shared memory.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    try:
        for tensor in tensors:
            tensor.share_memory_()
    except RuntimeError as error:
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors) / 1e6
        reason = str(error).rpartition(">: ")[2]
        raise UserError(
            f"there is no shared memory for a batch of {size:.1f} MB ({reason}): {MORE_SHARED_MEMORY}; then go on with "
            "--resume"
        ) from error
    return batch
