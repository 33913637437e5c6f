"""Weights whose rows are divided among processes (FSDP2 and HSDP).

Here is how they are divided, which layers can take it, and what is refused.

A weight is divided by its first dimension. If a slice of that dimension is a row of G, or of A
where the weight has the inputs first, every process preconditions its own rows. Other layers are
trained without curvature, and listed so.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.view import RowShards, shard_bounds

# ---- one parameter -------------------------------------------------------------------------------


def is_sharded(parameter: Tensor) -> bool:
    """Return whether a parameter is a DTensor."""
    # Whoever has a DTensor has imported it, which takes a second.
    tensors = sys.modules.get("torch.distributed.tensor")
    return isinstance(parameter, getattr(tensors, "DTensor", ()))


def is_fully_sharded(module: object) -> bool:
    """Return whether a module was given to ``fully_shard``."""
    # whoever has called fully_shard has imported it
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def _is_supported(parameter: Any) -> bool:
    """Return whether a DTensor of ``fully_shard`` is divided by rows, along one dimension at most.

    Of a mesh of two dimensions that is the last; processes along the first hold the same rows.
    """
    *replicas, last = parameter.placements
    by_rows = type(last).__name__ == "Shard" and last.dim == 0
    return (
        len(replicas) < 2
        and all(p.is_replicate() for p in replicas)
        and (by_rows or last.is_replicate())
    )


def row_shards_of(parameter: Any) -> RowShards | None:
    """Return how the rows of a parameter are divided."""
    if not is_sharded(parameter) or not any(
        placement.is_shard() for placement in parameter.placements
    ):
        return None
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    count, index = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
    rows = parameter.shape[0]
    starts = shard_bounds(rows, count)
    # the processes of the first row of a mesh (replica, shard) own the blocks
    bounds = (*starts, *[rows] * (mesh.size() - count))

    def wrap(local: Tensor) -> Tensor:
        shape = torch.Size((rows, *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    has_replicas = mesh.ndim > 1 and mesh.size(0) > 1
    own_rows = slice(starts[index], starts[index + 1])
    return RowShards(count, bounds, own_rows, index, wrap, has_replicas)


def device_of_mesh(parameter: Any) -> torch.device:
    """Return the device on which the processes communicate.

    The parameter itself may be kept on the CPU.
    """
    kind = parameter.device_mesh.device_type
    return (
        torch.device(kind)
        if kind == "cpu"
        else torch.device(kind, torch.accelerator.current_device_index())
    )


# ---- the layers of a model -----------------------------------------------------------------------


def check_sharded(model: nn.Module, trained: Iterable[Tensor]) -> None:
    """Raise an error for a parameter that is divided in a way that is not supported."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"module {name or 'itself'!r} is a FullyShardedDataParallel, which puts the "
                "parameters of several layers into one; use its successor "
                "torch.distributed.fsdp.fully_shard, then make the optimizer from the model"
            )
    sharded = {id(parameter) for parameter in trained if is_sharded(parameter)}
    of_fsdp = {
        id(p) for module in model.modules() if is_fully_sharded(module) for p in module.parameters()
    }
    parameter: Any
    for name, parameter in model.named_parameters():
        if id(parameter) not in sharded:
            continue
        if id(parameter) not in of_fsdp or not _is_supported(parameter):
            raise ValueError(
                f"parameter {name!r} is a DTensor that this optimizer cannot train: it is divided "
                f"as {tuple(parameter.placements)}, and must be by rows, by fully_shard (FSDP2, "
                "HSDP) and not by tensor parallelism. Use only fully_shard and pass the model "
                "that it was given, or leave the parameter to another optimizer, and give this "
                "one the others, with model=model"
            )
