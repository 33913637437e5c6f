"""Weights whose rows are divided among processes (FSDP2 and HSDP).

Here is how they are divided, which layers can take it, and what is refused.

A weight is divided by its first dimension. If a slice of that dimension is a row of G, or of A
where the weight has the inputs first, every process preconditions its own rows. Other layers are
trained without curvature, and listed so.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

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


def _why_not_supported(parameter: Any, *, of_fsdp: bool) -> str | None:
    """Return the reason why a DTensor cannot be trained with curvature."""
    placements = parameter.placements
    divided = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    by_rows = all(getattr(placements[i], "dim", 0) == 0 for i in divided)
    is_plain = all(type(placements[i]).__name__ == "Shard" for i in divided)
    so = f"it is divided as {tuple(placements)}"
    rules = (
        (of_fsdp, f"{so} by other means than fully_shard, as by tensor parallelism"),
        (len(divided) < 2 and is_plain, f"{so}, as by tensor parallelism, not by FSDP2 or HSDP"),
        (by_rows, f"{so}, and rows must stay whole: Shard(0), the default of fully_shard"),
        (
            divided in ([], [len(placements) - 1]),
            f"{so}; of a mesh of two dimensions the last must be that of the shards",
        ),
        (
            len(placements) < 3,
            f"its mesh has {len(placements)} dimensions, and must have one (FSDP) or two (HSDP)",
        ),
    )
    return next((why for holds, why in rules if not holds), None)


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
    for name, parameter in model.named_parameters():
        if id(parameter) not in sharded:
            continue
        why = _why_not_supported(parameter, of_fsdp=id(parameter) in of_fsdp)
        if why is not None:
            raise ValueError(
                f"parameter {name!r} is a DTensor that this optimizer cannot train: {why}. Use "
                "fully_shard alone and pass the model that it was given, or leave the parameter "
                "to another optimizer, and give this one the others, with model=model"
            )


def check_shards_fit(parameters: Sequence[tuple[str, Any]], group: Any) -> None:
    """Check that those processes refresh together among which the parameters are divided."""
    for name, parameter in parameters:
        members = [dist.get_rank()] if group is False else dist.get_process_group_ranks(group)
        ranks = parameter.device_mesh.mesh.flatten().tolist()  # in the order of the mesh
        if ranks != members:
            raise ValueError(
                f"process_group={group!r}: parameter {name!r} is divided among the ranks {ranks}, "
                f"and the optimizer would refresh with the ranks {members}; give "
                "distributed=torch_thor.Distributed(process_group=...) the group of the mesh that "
                "fully_shard got"
            )
