"""Parameters that are divided among the processes, for `parallel=fsdp` and `parallel=hsdp`.

With fsdp every process holds a part of each parameter, of its gradient and of its optimizer state, and the parameters
of a block are collected while the block computes (torch's `fully_shard`). With hsdp the processes form groups, each of
which divides one copy of the network. On one process nothing is divided.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_thor.capture.sharding import is_fully_sharded
from torch_thor.training.config.run_config import RunConfig
from torch_thor.training.engine import parallel
from torch_thor.training.errors import require

if TYPE_CHECKING:  # importing them takes a second, which a training on one process need not wait for
    from torch.distributed.device_mesh import DeviceMesh


def divide(models: Iterable[nn.Module], config: RunConfig, device: torch.device) -> None:
    """Divide networks among the processes in place, if the configuration says so. Every process must call it.

    This replaces the parameters, so it must be done before the optimizer is made. On more than one process, networks
    on the CPU are moved to the device block by block.

    Args:
        models: The networks, with the same weights on every process.
        config: The settings of the training.
        device: The device of this process.

    Raises:
        UserError: If the number of processes is not a multiple of `shards`.
    """
    mesh = _mesh(config, device)
    if mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    for model in models:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # not channels_last, which fully_shard refuses
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


def _mesh(config: RunConfig, device: torch.device) -> DeviceMesh | None:
    world = parallel.shard().world_size
    if config.parallel == "ddp":
        return None
    shards = world
    if config.parallel == "hsdp":
        shards = config.shards or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        require(
            world % shards == 0 or world == 1,
            f"parallel=hsdp divides {world} processes into groups of shards={shards}, which leaves some over: choose "
            f"shards so that it divides {world}",
        )
    if world == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    if config.parallel == "fsdp":
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shards",))
    require(
        shards > 1,
        f"parallel=hsdp with groups of {shards} process divides nothing: set shards to 2 or more, or use parallel=ddp",
    )
    return init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=("replicas", "shards"))


def blocks(model: nn.Module) -> list[nn.Module]:
    """Find the parts of a network whose parameters are collected together, such as the layers of a transformer.

    These are the elements of its lists (`nn.Sequential`, `nn.ModuleList`, `nn.ModuleDict`), and of lists that are
    elements of lists; the insides of other elements are not searched.

    Args:
        model: The network.

    Returns:
        The blocks with trained parameters. The parameters outside of them, and those that a block shares with the rest
        of the network, belong to the network itself.
    """
    found = [block for block in _elements(model) if block is not model and any(True for _ in block.parameters())]
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    distinct = list({id(block): block for block in found}.values())
    return [block for block in distinct if not _shares(block, owners)]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
                yield from _elements(child)
            else:
                yield child
    else:
        for child in module.children():
            yield from _elements(child)


def _shares(block: nn.Module, owners: dict[int, int]) -> bool:
    own: dict[int, int] = {}
    for module in block.modules():
        for parameter in module.parameters(recurse=False):
            own[id(parameter)] = own.get(id(parameter), 0) + 1
    return any(owners[key] > count for key, count in own.items())


def is_divided(model: nn.Module) -> bool:
    """Return whether the parameters of a network are divided among the processes.

    Args:
        model: The network.

    Returns:
        True after `divide` on more than one process.
    """
    return is_fully_sharded(model)


def weigh_gradients(model: nn.Module, weight: parallel.RankWeight) -> None:
    """Weight the gradients of this process in the mean over all processes.

    Args:
        model: A divided network.
        weight: The weight, which may be changed before each step.
    """
    for module in _divided(model):
        module.set_custom_reduce_scatter(_WeightedReduceScatter(weight))


class _WeightedReduceScatter:
    """Reduces the gradients as `fully_shard` does by itself, after they are weighted.

    Args:
        weight: The weight of this process.
    """

    def __init__(self, weight: parallel.RankWeight) -> None:
        self.weight = weight

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the buffer of a collective.

        Args:
            size: Its shape.
            dtype: Its type.
            device: Its device.

        Returns:
            The buffer, not initialised.
        """
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.weight.value != 1:
            input_tensor.mul_(self.weight.value)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def release(model: nn.Module) -> None:
    """Free the collected parameters, which a forward pass without a backward pass keeps.

    Args:
        model: A network, divided or not.
    """
    for module in _divided(model):
        module.reshard()


def _divided(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_fully_sharded(module)]
