"""Batches as functions of the seed and their number, whatever the numbers of workers and processes.

A training batch is a list of keys (epoch, index), and each sample is a function of the seed and its
key. Samples that do not fill a batch at the end of an epoch are left out, other samples in each
epoch. Without worker processes the training itself makes each batch when it is due;
otherwise torch's DataLoader makes some batches ahead.
"""

import atexit
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count as count_from
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from torch_thor.errors import require
from torch_thor.torch_internals import tree_leaves, tree_map
from torch_thor.training.parallel import Ranks

Key = tuple[int, int]  # epoch and index of a sample


def allowed_cores() -> int:
    """Return the number of cores that a scheduler or `taskset` leaves to this process."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def digest(*parts: object) -> int:
    """Return a seed of 63 bits that is a function of the parts."""
    return (
        int.from_bytes(hashlib.sha256(",".join(map(str, parts)).encode()).digest()[:8], "big") >> 1
    )


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples in an epoch, a permutation of range(count)."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(digest(seed, epoch)))


def batches_per_epoch(count: int, batch_size: int, world: int = 1) -> int:
    """Return the number of whole batches in an epoch.

    Raises:
        UserError: If there is none, or the processes cannot share a batch evenly.
    """
    require(
        batch_size % world == 0,
        f"batch_size={batch_size} cannot be shared evenly by {world} processes: it is the number "
        f"of samples per step on all of them together; choose a multiple of {world}",
    )
    require(
        batch_size <= count,
        f"batch_size={batch_size} is larger than the training set ({count} samples): lower "
        "batch_size",
    )
    return count // batch_size


def training_keys(
    count: int, batch_size: int, seed: int, ranks: Ranks, start: int
) -> Iterator[list[Key]]:
    """Return the keys of the training batches of a process, epoch after epoch, without end.

    Args:
        count: Samples in the training set.
        batch_size: Samples in a batch, on all processes together.
        seed: The seed of the run.
        ranks: The process among those that share each batch.
        start: The number of batches already done, over all epochs.
    """
    per_epoch, share = batches_per_epoch(count, batch_size, ranks.world), batch_size // ranks.world
    order = lru_cache(1)(lambda epoch: epoch_order(count, seed, epoch))

    def keys(number: int) -> list[Key]:
        epoch, batch = divmod(number, per_epoch)
        first = batch * batch_size + ranks.rank * share
        return [(epoch, index) for index in order(epoch)[first : first + share].tolist()]

    return map(keys, count_from(start))


def held_out_keys(count: int, batch_size: int, ranks: Ranks) -> Iterator[tuple[list[int], bool]]:
    """Yield the indices of the evaluation batches of a process, and whether each counts.

    The batches are those of a single process, in the order of the set, dealt out in turn. A process
    with a batch fewer than another gets the very first instead, which does not count.
    """
    number = -(-count // batch_size)
    for first in range(0, number, ranks.world):
        counts = first + ranks.rank < number
        index = first + ranks.rank if counts else 0
        yield list(range(index * count // number, (index + 1) * count // number)), counts


def take(tensors: Any, indices: Sequence[int]) -> Any:
    """Return a batch of samples from a tree of tensors in memory."""
    rows = torch.tensor(indices, dtype=torch.int64, device=tree_leaves(tensors)[0].device)
    return tree_map(lambda tensor: tensor[rows], tensors)


def in_memory(tensors: Any, keys: Iterable[list[Key]]) -> Iterator[Any]:
    """Yield the batches of a tree of tensors in memory."""
    return (take(tensors, [index for _, index in batch]) for batch in keys)


def loaded(
    dataset: Dataset[Any],
    keys: Iterable[list[Any]],
    *,
    workers: int,
    prefetch: int,
    device: torch.device,
    max_broken: float = 0.0,
    say: Callable[[str], None] = print,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Iterator[Any]:
    """Yield batches that worker processes make, without the samples that cannot be read.

    Args:
        dataset: Its samples by key; it has a length. A sample that cannot be read is the text that
            says why. Random numbers of a sample are torch's, and the dataset seeds them, by
            `torch.default_generator.manual_seed`.
        keys: The keys of each batch.
        workers: The number of processes; 0 makes the batches in this process.
        prefetch: Batches that each process makes ahead.
        device: The device of the batches.
        max_broken: Largest share of the samples that may be unreadable.
        say: Prints a line; it is called for each unreadable sample.
        collate: Makes a batch, a tree of tensors, from its readable samples.

    Raises:
        UserError: If too many samples are unreadable, or all of a batch.
    """
    loader = DataLoader(
        _Batches(dataset, collate),
        batch_size=None,  # a batch is one item, whose index is the list of its keys
        sampler=keys,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=device.type == "cuda",  # a GPU copies from such memory while it computes
        worker_init_fn=_ignore_signals if workers else None,
        # the loader draws a number, which must not come from the generator of dropout
        generator=torch.Generator(),
    )
    size, broken = len(cast(Any, dataset)), set[str]()
    for batch, reasons in loader:
        for reason in reasons:
            if reason not in broken:
                broken.add(reason)
                say(f"{reason} and is left out")
                require(
                    len(broken) <= max_broken * size,
                    f"{len(broken)} of {size} samples cannot be read, more than "
                    f"data.max_broken={max_broken:g} allows; the latest: {reason}: repair or "
                    "remove them, or raise data.max_broken",
                )
        require(
            batch is not None,
            f"no sample of a batch can be read ({'; '.join(reasons[:2])}): repair or remove them, "
            "or raise batch_size",
        )
        yield tree_map(lambda leaf: leaf.to(device, non_blocking=True), batch)


class _Batches(Dataset[Any]):
    """Whole batches: the tree of the readable samples, None if there is none, and the faults."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, keys: list[Any]) -> tuple[Any, list[str]]:
        with torch.random.fork_rng(devices=[]):  # dropout uses the generator that samples seed
            samples = [self.dataset[key] for key in keys]
        good = [sample for sample in samples if not isinstance(sample, str)]
        batch = self.collate(good) if good else None
        # A worker shares it here, because torch's own thread would drop it where /dev/shm is full,
        # and the training would wait for ever.
        if good and get_worker_info():
            tree_map(Tensor.share_memory_, batch)
        return batch, [sample for sample in samples if isinstance(sample, str)]


def _ignore_signals(_: int) -> None:
    # Ctrl-C, torchrun and schedulers signal every process, and the training needs its workers until
    # it has saved
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@atexit.register
# Python would send SIGTERM, which the workers of batches that are not read to their end ignore, and
# wait for them.
def _end_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes their end for an error
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
