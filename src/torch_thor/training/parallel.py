"""Training on several processes started by `torchrun`: ranks, communication, and what they divide.

With `parallel=ddp` each process holds the whole network. With `fsdp` each holds a part of every
parameter, of its gradient and of its optimizer state (torch's `fully_shard`); with `hsdp` groups of
processes each divide one copy. Without `torchrun` there is one process, and nothing here
communicates. If a process ends, `torchrun` ends the others, names it in its table, and starts all
again with `--max-restarts`.
"""

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from torch_thor.capture.sharding import is_fully_sharded
from torch_thor.curvature.blocks import wide_dtype
from torch_thor.distributed.data_parallel import reduce_scatter
from torch_thor.errors import UserError, first_line, require
from torch_thor.training.recipe_model import Recipe

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """One of the processes that train together; by default the only process.

    Args:
        rank: Its number, from 0.
        world: The number of processes.
        device: Its device.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = _CPU

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def total(self, values: list[float]) -> list[float]:
        """Sum numbers over all processes, which must call it, bit for bit the same on all."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=wide_dtype(self.device), device=self.device)
        dist.all_reduce(tensor)
        return cast(list[float], tensor.tolist())

    def gathered(self, value: Any) -> list[Any]:
        """Collect a picklable object from every process, in rank order; all must call it."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the picklable object of the first process. Every process must call it."""
        return self.gathered(value if self.first else None)[0]


def device_of(name: str) -> torch.device:
    """Return a recipe's device; under `torchrun`, `auto` and `cuda` are the GPU of this process."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and dist.is_torchelastic_launched():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.ones(1, device=device)
    # torch asserts when it was built without CUDA, and imports modules of other devices
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(
            f"device={name} cannot be used ({first_line(error)}): try device=cpu or device=auto"
        ) from error
    return device


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def processes(recipe: Recipe) -> Iterator[Ranks]:
    """Join the processes that `torchrun` started, if it did; set the recipe's thread count."""
    device, before = device_of(recipe.device), torch.get_num_threads()
    joins = dist.is_torchelastic_launched() and not dist.is_initialized()
    if joins:
        store, rank, world = next(rendezvous("env://"))
        # The store still has the addresses of the processes that `torchrun` started before these.
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend: dict[str, Any] = {"backend": "gloo"}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = {"backend": "nccl", "device_id": device}
        dist.init_process_group(store=store, rank=rank, world_size=world, **backend)
    torch.set_num_threads(recipe.threads or before)
    try:
        yield (
            Ranks(dist.get_rank(), dist.get_world_size(), device)
            if dist.is_initialized()
            else Ranks(device=device)
        )
    finally:
        torch.set_num_threads(before)
        if joins:
            # DDP wrappers in reference cycles must be freed before the group that they use.
            gc.collect()
            dist.destroy_process_group()


@dataclass
class RankWeight:
    """The weight of a process's gradients in the mean over all: larger with more loss terms.

    Not the loss is scaled but the gradients, where they are averaged: THOR's statistics need those
    of the outputs.
    """

    value: float = 1.0


def connect(model: nn.Module, ranks: Ranks, weight: RankWeight) -> nn.Module:
    """Return the network whose gradients are those of all processes.

    The weight may be changed before each step.
    """
    if ranks.world == 1:
        return model
    if is_fully_sharded(model):
        for module in _divided(model):
            module.set_custom_reduce_scatter(_WeightedReduceScatter(weight))
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(weight, _average)
    return wrapped


def _average(
    weight: RankWeight,
    # The class exists where torch has distributed training.
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().mul_(weight.value / dist.get_world_size())
    if buffer.is_cuda:
        return (
            dist.all_reduce(buffer, async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )
    # They are summed singly, so that a resumed run equals an uninterrupted run bit for bit.
    # The order in which gloo sums over the processes depends on the place of an element in its
    # tensor, and DDP fills its buckets in another order after its first step, which a resumed run
    # takes later.
    gradients = buffer.split([gradient.numel() for gradient in bucket.gradients()])
    sums = [dist.all_reduce(gradient, async_op=True).get_future() for gradient in gradients]
    return torch.futures.collect_all(sums).then(lambda _: buffer)


@dataclass
class _WeightedReduceScatter:
    """Reduces the gradients as `fully_shard` does by itself, after they are weighted."""

    weight: RankWeight

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the buffer of a collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:  # fmt: skip
        weighted = input_tensor.mul_(self.weight.value)
        return reduce_scatter(output_tensor, weighted, group=group, op=op, async_op=async_op)


def divide(models: Iterable[nn.Module], recipe: Recipe, ranks: Ranks) -> None:
    """Divide networks in place, and move them to the device block by block.

    This replaces their parameters.
    """
    from torch.distributed.device_mesh import init_device_mesh  # takes a second, as the next one
    from torch.distributed.fsdp import fully_shard

    hybrid, of_machine = recipe.parallel == "hsdp", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shards = recipe.shards or of_machine if hybrid else ranks.world
    require(
        shards > 1 and ranks.world % shards == 0,
        f"parallel={recipe.parallel} cannot divide {ranks.world} processes into groups of "
        f"shards={shards}: shards must be 2 or more and divide the number of processes; or use "
        "parallel=ddp",
    )
    shape = (ranks.world // shards, shards) if hybrid else (shards,)
    mesh = init_device_mesh(
        ranks.device.type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]
    )
    for model in models:
        for parameter in model.parameters():
            # fully_shard refuses channels_last.
            parameter.data = parameter.data.contiguous()
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Find elements of lists, such as transformer layers, that are gathered separately."""
    # Parameters outside of them, and those that a block shares with the rest, are the network's.
    lists = nn.Sequential | nn.ModuleList | nn.ModuleDict
    elements = [
        child
        for module in model.modules()
        if isinstance(module, lists)
        for child in module.children()
        if not isinstance(child, lists)
    ]
    nested = {inner for element in elements for inner in element.modules() if inner is not element}

    def owners(module: nn.Module) -> Counter[int]:
        return Counter(
            id(parameter)
            for part in module.modules()
            for parameter in part.parameters(recurse=False)
        )

    every = owners(model)
    by_block = {block: owners(block) for block in elements if block not in nested}
    return [block for block, uses in by_block.items() if uses and uses.items() <= every.items()]


def release(model: nn.Module) -> None:
    """Free a divided network's collected parameters, kept after a forward pass without backward."""
    for module in _divided(model):
        module.reshard()


def _divided(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_fully_sharded(module)]


def share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Copy the first process's buffers, which a checkpoint contains, to every process.

    Every process calls it.
    """
    if ranks.world > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def without_averaging(net: nn.Module) -> AbstractContextManager[None]:
    """Return the context of a step's micro-batch before the last: gradients are not averaged yet.

    Divided networks average those of each micro-batch, because otherwise every process would hold
    whole tensors.
    """
    return cast(AbstractContextManager[None], getattr(net, "no_sync", nullcontext)())
