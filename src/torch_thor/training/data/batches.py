"""Batches as functions of the seed and their number, whatever the numbers of workers and processes.

A training batch is a list of keys (epoch, index), and each sample is a function of the seed and its
key. Samples that do not fill a batch at the end of an epoch are left out; they are different ones
in each epoch. Without worker processes the training itself makes each batch when it is due;
otherwise torch's DataLoader makes some batches ahead.
"""

import atexit
import hashlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count as count_from
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import is_torchelastic_launched
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from torch_thor.errors import UserError, first_line, require
from torch_thor.torch_internals import let_go_of_workers, tree_leaves, tree_map
from torch_thor.training.cores import allowed_cores
from torch_thor.training.errors import UnreadableError
from torch_thor.training.parallel import Ranks
from torch_thor.training.workers import check_temporary_folder

Key = tuple[int, int]  # epoch and index of a sample
warnings.filterwarnings("ignore", "This DataLoader will create")  # `check_workers` says it once


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
    with one fewer than another gets the very first instead, which does not count.
    """
    number = -(-count // batch_size)
    for first in range(0, number, ranks.world):
        counts = first + ranks.rank < number
        index = first + ranks.rank if counts else 0
        yield list(range(index * count // number, (index + 1) * count // number)), counts


def smallest_part(count: int, parts: int) -> int:
    """Return the size of the smallest micro-batch that `torch.Tensor.chunk` makes of a batch."""
    return (count - 1) % -(-count // parts) + 1


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
    parts: int = 1,
    least: int = 1,
    patient: bool = False,
) -> Iterator[tuple[Any, bool]]:
    """Yield batches that worker processes make, and whether each has a sample of its own keys.

    A sample that cannot be read is left out of its batch. Where too few are left, others of the
    data set are added, which ones is a function of the keys.

    Args:
        dataset: Its samples by key; it has a length. A sample that cannot be read is the text that
            says why. Random numbers of a sample are torch's, and the dataset seeds them, by
            `torch.default_generator.manual_seed`.
        keys: The keys of each batch.
        workers: The number of processes; 0 makes the batches in this one.
        prefetch: Batches that each process makes ahead.
        device: The device of the batches.
        max_broken: Largest share of the samples that may be unreadable.
        say: Prints a line; it is called for each unreadable sample.
        collate: Makes a batch, a tree of tensors, from its readable samples.
        parts: The number of micro-batches into which a batch will be cut.
        least: The number of samples that a micro-batch needs.
        patient: Whether all batches are yielded before too many unreadable samples are an error:
            forward passes that communicate need the same number of batches on all processes.

    Raises:
        UnreadableError: If too many samples are unreadable.
        UserError: If too few are left for a batch, or a worker cannot be started or dies.
    """
    loader = DataLoader(
        _Batches(dataset, collate, parts, least, int(max_broken * len(cast(Any, dataset)))),
        batch_size=None,  # a batch is one item, whose index are its keys
        sampler=keys,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=device.type == "cuda",  # a GPU copies from such memory while it computes
        worker_init_fn=_start_worker if workers else None,
        # the loader draws a number, which must not come from the generator of dropout
        generator=torch.Generator(),
    )
    handler = signal.getsignal(signal.SIGCHLD)
    faults = _Faults(len(cast(Any, dataset)), max_broken, say)
    others = multiprocessing.active_children()
    try:
        batches = iter(loader)
    except OSError as error:  # no memory, process or semaphore left
        raise UserError(
            f"data.workers.count={workers}: the worker processes cannot be started "
            f"({error.strerror or error}): use fewer, or 0 to read in the training process"
        ) from error
    # torch's handler would raise the death of a worker in the middle of a step or of a checkpoint
    finally:
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
    own = [child for child in multiprocessing.active_children() if child not in others]
    with _killed_by_errors(own, batches):
        while (answer := _next(batches, workers)) is not None:
            if isinstance(answer, UserError):
                raise answer
            batch, readable, reasons = answer
            faults.tell(reasons)
            if faults.error is not None and not patient:
                raise faults.error
            if batch is None:
                raise faults.error or UserError(
                    "too few samples for a batch can be read; the latest: "
                    f"{reasons[-1]}: check the disk"
                )
            yield tree_map(lambda leaf: leaf.to(device, non_blocking=True), batch), readable
        if faults.error is not None:
            raise faults.error


class _Faults:
    """Samples that cannot be read: each is told once, and too many are an error.

    Args:
        size: The number of samples.
        allowed: Largest share of them that may be unreadable.
        say: Prints a line.
    """

    def __init__(self, size: int, allowed: float, say: Callable[[str], None]) -> None:
        self.size, self.allowed, self.say = size, allowed, say
        self.known = set[str]()
        self.error: UnreadableError | None = None

    def tell(self, reasons: Iterable[str]) -> None:
        """Say which samples are left out, until there are too many."""
        for reason in reasons:
            if reason not in self.known and self.error is None:
                self.known.add(reason)
                self.say(f"{reason} and is left out")
                if len(self.known) > self.allowed * self.size:
                    self.error = UnreadableError(
                        f"{len(self.known)} of {self.size} samples cannot be read, more than "
                        f"data.max_broken={self.allowed:g} allows; the latest: {reason}: repair or "
                        "remove them, or raise data.max_broken"
                    )


@contextmanager
def _killed_by_errors(
    workers: Sequence[multiprocessing.process.BaseProcess], batches: Iterator[Any]
) -> Iterator[None]:
    """Kill worker processes after an error.

    Torch would wait for each: 5 s if another has died, 10 s when a traceback that holds the
    iterator is collected as garbage, where the queue to the worker is closed first.
    """
    try:
        yield
    except Exception:
        for worker in workers:
            worker.kill()
        if workers:
            let_go_of_workers(batches)
        raise


def check_workers(count: int, say: Callable[[str], None]) -> None:
    """Say a line if this machine's training processes together have more workers than cores.

    Raises:
        UserError: If workers cannot be used here.
    """
    if count:
        check_temporary_folder("data.workers.count=0 to read in the training process")
    cores = allowed_cores()
    processes = int(os.environ["LOCAL_WORLD_SIZE"]) if is_torchelastic_launched() else 1
    if count * processes > cores:
        say(
            f"data.workers.count={count}: {count * processes} worker processes share {cores} "
            f"cores; data.workers.count={cores // processes} would be enough"
        )


class _Batches(Dataset[Any]):
    """Whole batches: each the tree of its readable samples, whether any is its own, and faults.

    A batch is None if too few samples of the whole data set can be read.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        parts: int,
        least: int,
        allowed: int,
    ) -> None:
        self.dataset, self.collate, self.parts, self.least = dataset, collate, parts, least
        self.allowed = allowed  # unreadable samples

    def __getitem__(self, keys: list[Any]) -> Any:
        # errors are returned, because the loader would put the traceback of the worker into a
        # raised one
        try:
            samples = [self.dataset[key] for key in keys]
            good = [sample for sample in samples if not isinstance(sample, str)]
            reasons = [sample for sample in samples if isinstance(sample, str)]
            readable = bool(good)
            others = self._others(keys[0])
            while not self._enough(good) and len(reasons) <= self.allowed:
                sample = next(others, None)
                if sample is None:
                    break
                (reasons if isinstance(sample, str) else good).append(sample)
            batch = self.collate(good) if self._enough(good) else None
            # torch would do it later, in a thread that drops what cannot be shared
            if batch is not None and get_worker_info():
                tree_map(Tensor.share_memory_, batch)
            return batch, readable, reasons
        except UserError as error:
            return error
        except (MemoryError, RuntimeError) as error:
            # These are torch's errors if memory cannot be shared.
            if isinstance(error, RuntimeError) and not str(error).startswith("unable to"):
                raise
            return UserError(
                f"there is no memory for a batch ({first_line(error)}): {_MORE_MEMORY}"
            )

    def _enough(self, good: list[Any]) -> bool:
        return bool(good) and smallest_part(len(good), self.parts) >= self.least

    def _others(self, key: Key) -> Iterator[Any]:
        """Yield samples of the whole data set, from a place that depends on a key."""
        (epoch, index), size = key, len(cast(Any, self.dataset))
        first = digest(epoch, index)
        return (self.dataset[epoch, (first + number) % size] for number in range(size))


_MORE_MEMORY = (
    "enlarge /dev/shm (docker run --shm-size=8g), or lower data.workers.count, "
    "data.workers.prefetch or batch_size; then continue with --resume"
)


def _start_worker(_: int) -> None:
    # Ctrl-C, torchrun and schedulers signal every process, and the training needs its workers until
    # it has saved
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


@atexit.register
# Workers of batches that are not read to their end live on: Python would send SIGTERM, and wait.
def _end_workers() -> None:
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _next(batches: Iterator[Any], workers: int) -> Any:
    state = torch.get_rng_state()
    try:
        return next(batches, None)
    except (RuntimeError, OSError, EOFError) as error:
        # Torch tells an error of a sample with these words and the traceback of its worker.
        if not workers or str(error).startswith("Caught"):
            raise
        raise UserError(
            "a worker process of the data has died, most likely because memory was full "
            f"({first_line(error)}): {_MORE_MEMORY}"
        ) from error
    finally:  # samples made in this process have seeded the generator, which dropout uses
        torch.set_rng_state(state)
