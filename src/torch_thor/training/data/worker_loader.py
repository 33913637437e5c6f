"""Batches that worker processes make from keys, of images and of text alike."""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from torch_thor.training.config.data_spec import Workers
from torch_thor.training.data.shards import BatchOrder
from torch_thor.training.data.workers import MORE_SHARED_MEMORY, DeathWatch, start_worker
from torch_thor.training.errors import UserError

Key = tuple[int, int]  # epoch, number of the sample: all that a worker must be told
Made = TypeVar("Made")


class Keys:
    """The keys of an epoch's batches, taken down when an iteration begins: workers read ahead of the position.

    Args:
        order: Which samples, and when.
    """

    def __init__(self, order: BatchOrder) -> None:
        self.order = order
        self.epoch = self.start = 0

    def __len__(self) -> int:
        """Batches that are left of the epoch."""
        return self.order.batches - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        return ([(epoch, index) for index in batch] for batch in self.order.epoch(epoch, self.start))


class WorkerLoader(Generic[Made]):
    """Batches from worker processes that stay alive from one iteration to the next.

    Args:
        loader: Gives batches, or the error that stands in the place of one.
    """

    def __init__(self, loader: DataLoader[Made]) -> None:
        self.loader, self.watch = loader, DeathWatch()

    def __iter__(self) -> Iterator[Made]:
        """Read on.

        Yields:
            Batches.

        Raises:
            UserError: If the machine is at fault and not a sample: no memory, a worker killed.
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
    """Make batches in worker processes.

    Args:
        reader: Makes a whole batch of a list of keys (`__getitems__`), or returns a `UserError`, which is raised here.
        batches: Asked for its keys anew in each iteration.
        workers: The processes.
        pin_memory: Whether batches are in page-locked memory, from which a GPU copies them while it computes.

    Returns:
        An iterable of what the reader makes.
    """
    several = workers.count > 0
    loader = _Loader(
        reader,
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
    return WorkerLoader(loader)


class _Loader(DataLoader[Made]):
    def check_worker_number_rationality(self) -> None:
        pass  # `check_workers` has said it, once and for all processes


def _as_it_is(batch: Any) -> Any:
    return batch


def shared(batch: Made) -> Made:
    """Move a batch to shared memory, in a worker.

    Here and not where torch would do it, in a thread that loses what cannot be shared: training would wait for ever.

    Args:
        batch: A tree with tensors among its leaves.

    Returns:
        The batch.

    Raises:
        UserError: If there is no room.
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
