"""Training on several processes, as `torchrun` starts them: their ranks and their communication.

Without `torchrun` there is one process, and nothing here communicates.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_thor.training.data.shards import Shard
from torch_thor.training.errors import ElsewhereError, UserError, first_line


def resolve_device(name: str) -> torch.device:
    """Turn a recipe's device into torch's.

    Args:
        name: `auto` or a device name; under `torchrun` `auto` and `cuda` are this process's own GPU.

    Returns:
        The device.

    Raises:
        UserError: If torch does not know the name or has no such device.
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
    """Use so many threads of the CPU while the block runs.

    Args:
        count: How many; `None` leaves torch's choice.

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
def processes(device: torch.device) -> Iterator[None]:
    """Join the other processes that `torchrun` has started; NCCL for GPUs, gloo for CPUs.

    Args:
        device: This process's.

    Yields:
        While the group exists.
    """
    if not dist.is_torchelastic_launched() or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        gc.collect()  # a DDP wrapper in a reference cycle goes before the group that it holds, not at the program's end
        dist.destroy_process_group()


def shard() -> Shard:
    """Which process this is.

    Returns:
        Its rank, and how many there are.
    """
    return Shard(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Shard()


def local_processes() -> int:
    """Return how many training processes run on this machine.

    Returns:
        The number; 1 without `torchrun`.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if dist.is_initialized() else 1


def is_first() -> bool:
    """Tell whether this process is the one that writes files and prints.

    Returns:
        True on rank 0, and without `torchrun`.
    """
    return shard().rank == 0


def rank_zero_print(say: Callable[[str], None]) -> Callable[[str], None]:
    """Who says what all processes have to say.

    Args:
        say: Takes a line.

    Returns:
        `say` on rank 0, silence elsewhere.
    """
    return say if is_first() else lambda _: None


def total(values: list[float], device: torch.device) -> list[float]:
    """Sum numbers over all processes; every one must call it.

    Args:
        values: This process's numbers.
        device: A device that the group can communicate from.

    Returns:
        The sums, the same bits on all.
    """
    if shard().world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    sums: list[float] = tensor.tolist()
    return sums


def gathered(value: Any) -> list[Any]:
    """Collect a picklable object from all processes; every one must call it.

    Args:
        value: This process's.

    Returns:
        One for each rank, in their order.
    """
    world = shard().world_size
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values


@contextmanager
def agreed() -> Iterator[None]:
    """Do something that may fail on some processes and not on others; if it does on one, it fails on all.

    Else those that are well would wait for ever for those that are not. Every process must enter.

    Yields:
        For the block that may fail.

    Raises:
        UserError: On the first process that failed.
        ElsewhereError: On all others, with its words.
    """
    error = None
    try:
        yield
    except UserError as mine:
        error = mine
    messages = gathered(None if error is None else str(error))
    first = next((rank for rank, message in enumerate(messages) if message is not None), None)
    if first is None:
        return
    if error is not None and first == shard().rank:
        raise error
    raise ElsewhereError(messages[first]) from error


def wrap(model: nn.Module, device: torch.device) -> nn.Module:
    """Make a model average its gradients over all processes.

    Args:
        model: The network, on its device.
        device: That device.

    Returns:
        The network itself where there is one process.
    """
    if shard().world_size == 1:
        return model
    return DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )


def share_buffers(model: nn.Module) -> None:
    """Give every process the first one's buffers; every one must call it.

    Each process has running averages (BatchNorm's) of the batches that it saw last. A checkpoint holds the first one's,
    so an evaluation must use those too.

    Args:
        model: The network, on the device that the group communicates from.
    """
    if shard().world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def without_averaging(network: nn.Module) -> AbstractContextManager[None]:
    """Backward passes that leave gradients to this process, because more are to come in the same step.

    Args:
        network: From `wrap`, compiled or not.

    Returns:
        A context manager.
    """
    inner = getattr(network, "_orig_mod", network)  # torch.compile's wrapper
    context: AbstractContextManager[None] = (
        inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()
    )
    return context
