"""Processes on this machine (gloo, one thread each) for the study of several ranks."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_thor.training.parallel import blocks


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function on all processes, and return the answers by rank.

    The function receives the rank, the number of processes and `args`.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers, found = context.Queue(), {}
        ranks = [
            context.Process(
                target=_serve, args=(rank, world, Path(folder) / "store", function, args, answers)
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for _ in ranks:
            rank, answer, error = answers.get(timeout=900)
            if error is not None:
                for process in ranks:
                    process.terminate()
                raise RuntimeError(error)
            found[rank] = answer
        for process in ranks:
            process.join()
    return [found[rank] for rank in range(world)]


def _serve(
    rank: int, world: int, store: Path, function: Callable[..., Any], args: Any, answers: Any
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
        answers.put((rank, function(rank, world, *args), None))
        dist.barrier()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parallel(model: nn.Module, world: int, *, sharded: bool) -> nn.Module:
    """Prepare a model for training on all processes, with FSDP2 or DDP.

    FSDP2 is applied block by block, as `torch-thor train` does.
    """
    if not sharded:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
