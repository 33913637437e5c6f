"""Models under fully_shard, beside one process that cuts its blocks at the same places."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from joined import OPTIONS, network
from torch_thor import THOR

# The parameters of the bound are those of a shard, so it is off where one process is the reference; kl_clip is global.
GLOBAL = {"max_update_ratio": None, "kl_clip": None}


def mesh_of(shape):
    names = ("shards",) if len(shape) == 1 else ("replicas", "shards")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model, mesh, inner=(), **options):
    """Shard a model as torch's documentation does: some modules on their own, then the rest."""
    for name in inner:
        fully_shard(model.get_submodule(name), mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded(mesh, make=network, inner=(), fsdp=None, **options):
    """A model under FSDP2 and its THOR."""
    model = shard(make(), mesh, inner, **(fsdp or {}))
    return model, THOR(model, **{**OPTIONS, **GLOBAL, **options})


class RowParts(nn.Module):
    """A linear layer as one layer for each shard of its rows, which have bounds of their own."""

    def __init__(self, layer, world):
        super().__init__()
        weights = layer.weight.detach().chunk(world)
        biases = [None] * world if layer.bias is None else layer.bias.detach().chunk(world)
        self.parts = nn.ModuleList()
        for weight, bias in zip(weights, biases, strict=False):
            part = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
            with torch.no_grad():
                part.weight.copy_(weight)
                if bias is not None:
                    part.bias.copy_(bias)
            self.parts.append(part)

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], dim=-1)


def in_row_parts(model, world):
    """A copy of a model of linear layers, each of them in parts."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], RowParts(module, world))
    return model


def whole_weights(model):
    """The parameters of a sharded model, whole, by name."""
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def joined_parts(model):
    """The parameters of a model in row parts, by the names that they had before."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, RowParts):
            for attribute in ("weight", "bias"):
                parts = [getattr(part, attribute) for part in module.parts]
                if parts[0] is not None:
                    found[f"{name}.{attribute}"] = torch.cat([p.detach() for p in parts])
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, RowParts))
    for name, p in model.named_parameters():
        if not name.startswith(inside):
            found[name] = p.detach()
    return found
