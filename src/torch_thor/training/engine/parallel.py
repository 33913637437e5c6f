"""Training on several processes that `torchrun` has started: their ranks and their communication.

Without `torchrun` there is one process, and no function of this module communicates.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # where torch has distributed training
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from torch_thor.training.data.shards import Shard
from torch_thor.training.engine.ending import Answers, end_together, leave_at_exit, report
from torch_thor.training.errors import ElsewhereError, StoppedError, UserError, first_line


def resolve_device(name: str) -> torch.device:
    """Return the device that a recipe names.

    Args:
        name: `auto` or the name of a device. Under `torchrun`, `auto` and `cuda` stand for the GPU of this process.

    Returns:
        The device.

    Raises:
        UserError: If torch does not know the name or there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts when it was built without CUDA
        raise UserError(f"device={name} cannot be used ({first_line(error)}): try device=cpu or device=auto") from error
    return device


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set the number of CPU threads while the block runs.

    Args:
        count: Number of threads; `None` leaves the choice to torch.

    Yields:
        Nothing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def processes(device: torch.device, connect: Callable[[Any, int, int], str] = lambda *_: "group") -> Iterator[None]:
    """Create the process group while the block runs, if `torchrun` has started this process.

    The backend is NCCL for GPUs and gloo for CPUs.

    Args:
        device: The device of this process.
        connect: Called with the store, the rank and the number of processes before the group is created, to check that
            all processes are about to do the same. It returns a name for the group.

    Yields:
        Nothing.

    Raises:
        UserError: If another process has ended while this one communicated.
    """
    if not dist.is_torchelastic_launched() or dist.is_initialized():
        yield
        return
    store, rank, world = next(rendezvous("env://"))
    store = PrefixStore(connect(PrefixStore("torch_thor", store), rank, world), store)
    backend: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = {"backend": "nccl", "device_id": device}
    dist.init_process_group(store=store, rank=rank, world_size=world, **backend)
    # a connection of its own, which another thread can use while this one waits for a key
    ending, failed = PrefixStore("end", store.clone()), False
    try:
        with Answers(ending, rank, world):
            try:
                yield
            except Exception as error:
                if not isinstance(error, UserError | StoppedError):
                    failed = True
                    leave_at_exit()
                    end_together(ending, rank, world, error)
                elif not isinstance(error, ElsewhereError | StoppedError):  # of this process alone, if not of `agreed`
                    report(ending, rank, error)
                raise
    finally:
        if not failed:
            _destroy()


def _destroy() -> None:
    gc.collect()  # frees DDP wrappers in reference cycles before the group that they use is destroyed
    if dist.is_initialized():
        dist.destroy_process_group()


def shard() -> Shard:
    """Return the rank of this process and the number of processes.

    Returns:
        Both, as a `Shard`.
    """
    return Shard(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Shard()


def local_processes() -> int:
    """Return the number of training processes on this machine.

    Returns:
        The number; 1 without `torchrun`.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if dist.is_initialized() else 1


def is_first() -> bool:
    """Return whether this process is the one that writes files and prints.

    Returns:
        True on rank 0, and without `torchrun`.
    """
    return shard().rank == 0


def rank_zero_print(say: Callable[[str], None]) -> Callable[[str], None]:
    """Make a function that prints a line on rank 0 only.

    Args:
        say: Prints a line.

    Returns:
        `say` on rank 0, and a function that does nothing on the other ranks.
    """
    return say if is_first() else lambda _: None


def total(values: list[float], device: torch.device) -> list[float]:
    """Sum numbers over all processes. Every process must call it.

    Args:
        values: The numbers of this process.
        device: A device that the backend of the group supports.

    Returns:
        The sums, which are bit for bit the same on all processes.
    """
    if shard().world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    sums: list[float] = tensor.tolist()
    return sums


def gathered(value: Any) -> list[Any]:
    """Collect a picklable object from every process. Every process must call it.

    Args:
        value: The object of this process.

    Returns:
        One object for each rank, in the order of the ranks.
    """
    world = shard().world_size
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values


@contextmanager
def agreed() -> Iterator[None]:
    """Raise on every process if the block fails on any of them. Every process must enter it.

    Without it, the other processes would wait forever for one that has failed.

    Yields:
        Nothing.

    Raises:
        UserError: On the first process on which the block failed.
        ElsewhereError: On all others, with the same message.
    """
    error = None
    try:
        yield
    except UserError as raised:
        error = raised
    # a process that has only heard of an error, in an inner block, does not report it
    messages = gathered(None if error is None or isinstance(error, ElsewhereError) else str(error))
    first = next((rank for rank, message in enumerate(messages) if message is not None), None)
    if first is None:
        if error is not None:
            raise error
        return
    if error is not None and first == shard().rank:
        raise error
    raise ElsewhereError(messages[first]) from error


class RankWeight:
    """The weight of this process's gradients in the mean over all processes.

    A process whose batch has more loss terms than those of others has a larger weight, so that the mean is the gradient
    of the whole batch. Gradients are weighted where they are averaged and not by scaling the loss, so that THOR's
    statistics see output gradients as they are.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def set(self, terms: int, device: torch.device) -> None:
        """Set the weight for a step. Every process must call it.

        Args:
            terms: The number of loss terms of this process.
            device: A device that the backend of the group supports.
        """
        world = shard().world_size
        if world > 1:
            self.value = world * terms / total([float(terms)], device)[0]


def wrap(model: nn.Module, device: torch.device, weight: RankWeight) -> nn.Module:
    """Wrap a model with `DistributedDataParallel`, which averages gradients over all processes.

    Args:
        model: The network, on its device.
        device: That device.
        weight: The weight of this process, which may be changed before each step.

    Returns:
        The wrapper, or the network itself if there is only one process.
    """
    if shard().world_size == 1:
        return model
    wrapped = DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    # of two numbers, the sum does not depend on their order
    alone = device.type == "cpu" and shard().world_size > 2
    wrapped.register_comm_hook(weight, _average_alone if alone else _average)
    return wrapped


def _average(
    weight: RankWeight,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # defined where torch has distributed training
) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer().mul_(weight.value / dist.get_world_size())
    done = dist.all_reduce(gradients, async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


def _average_alone(
    weight: RankWeight,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # defined where torch has distributed training
) -> torch.futures.Future[Tensor]:
    # one by one, so that a resumed run is bit for bit that of an uninterrupted one: the order in which gloo sums over
    # the processes depends on the place of an element in its tensor, and DDP fills its buckets in another order after
    # its first step, which a resumed run takes later
    buffer = bucket.buffer().mul_(weight.value / dist.get_world_size())
    gradients = buffer.split([gradient.numel() for gradient in bucket.gradients()])
    sums = [dist.all_reduce(gradient, async_op=True).get_future() for gradient in gradients]
    return torch.futures.collect_all(sums).then(lambda _: buffer)


def share_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0 to every process. Every process must call it.

    The running statistics of BatchNorm differ between the processes, because each has seen other batches. A checkpoint
    contains those of rank 0, so an evaluation must use them too.

    Args:
        model: The network, on a device that the backend of the group supports.
    """
    if shard().world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def without_averaging(network: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which backward passes do not average gradients over the processes.

    It is for all micro-batches of a step except the last. Networks that are divided among the processes average the
    gradients of each micro-batch, because otherwise every process would hold whole ones.

    Args:
        network: The network from `wrap`, compiled or not.

    Returns:
        The context manager.
    """
    inner = getattr(network, "_orig_mod", network)  # torch.compile's wrapper
    context: AbstractContextManager[None] = (
        inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()
    )
    return context
