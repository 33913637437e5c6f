"""Processes on this machine (gloo, one thread each) for the benchmarks of several ranks, and what trains on them."""

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

from torch_thor import THOR
from torch_thor.split.observe import loss_of
from torch_thor.tools.plan import subject_of
from torch_thor.tools.split_dim import Subject
from torch_thor.training.models import bert
from torch_thor.training.parallel import blocks
from torch_thor.training.recipe import Data, Recipe, Text, Transform

ROUND = 2  # steps of THOR from one refresh to the next: one with and one without a refresh


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on so many processes at once.

    Args:
        world: Number of processes.
        function: Called with the rank, the number of processes and `args`, in a process group of all of them.
        args: Further arguments.

    Returns:
        What each process returned, by rank.

    Raises:
        SystemExit: If a process failed, with its traceback.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        ranks = [
            context.Process(target=_serve, args=(rank, world, Path(folder) / "store", function, args, answers))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        found = {}
        for _ in ranks:
            rank, answer, error = answers.get(timeout=900)
            if error is not None:
                for process in ranks:
                    process.terminate()
                raise SystemExit(error)
            found[rank] = answer
        for process in ranks:
            process.join()
    return [found[rank] for rank in range(world)]


def _serve(rank: int, world: int, store: Path, function: Callable[..., Any], args: Any, answers: Any) -> None:
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
    """Prepare a model for training on all processes.

    Args:
        model: The model.
        world: Number of processes.
        sharded: Whether to shard it (FSDP2, block by block as `torch-thor train` does), else DDP.

    Returns:
        The model that trains.
    """
    if not sharded:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def thor(model: nn.Module) -> THOR:
    """Make THOR with a short step, which refreshes all layers in every second step.

    Args:
        model: The model.

    Returns:
        The optimizer.
    """
    return THOR(model, lr=1e-6, update_interval=ROUND, trace_thresholds=(0.0, 0.0))


def sized(word: str, pixels: int, length: int) -> Recipe:
    """Make a recipe of a model for samples of another size.

    Args:
        word: A model of torchvision or timm, or a size of BERT.
        pixels: Height and width of images.
        length: Tokens of a text.

    Returns:
        The recipe.
    """
    if bert.is_known(word):
        return Recipe(task="masked-lm", model=word, data=Data(name="corpus", text=Text(length=length)))
    return Recipe(model=word, data=Data(name="image-folder", transform=Transform(size=pixels, resize=pixels)))


def made(word: str, count: int, pixels: int, length: int) -> Subject:
    """Build a model with a batch of random samples; arguments as for `sized`, and the number of samples."""
    return subject_of(word, sized(word, pixels, length), count)


def loss(model: nn.Module, subject: Subject) -> torch.Tensor:
    """Compute the loss of the batch of a subject with its model, or with a wrapper of it."""
    return loss_of(model, subject.batch, subject.loss_fn, torch.device("cpu"))
