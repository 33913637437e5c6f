"""Which layers can be preconditioned if the rows of their weights are divided among processes (FSDP2 and HSDP).

A weight is divided by its first dimension. If a slice of that dimension is a row of G, or of A where the weight has the
inputs first, every process preconditions its own rows. Other layers are trained without curvature, and listed so.
"""

import copy
import math

import torch
from torch import nn

from torch_thor.capture.layers import Layer
from torch_thor.curvature.kinds import Kind
from torch_thor.distributed.sharded_parameters import is_sharded, row_shards_of, why_not_supported


def check_sharded(model: nn.Module) -> None:
    """Raise an error for a parameter that is divided in a way that THOR does not support.

    Args:
        model: the model.

    Raises:
        ValueError: a parameter is divided by another dimension or several (tensor parallelism), or is a flat parameter
            of FullyShardedDataParallel, which holds those of several layers.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"module {name or 'itself'!r} is a FullyShardedDataParallel, which puts the parameters of several "
                f"layers into one; use its successor torch.distributed.fsdp.fully_shard, then THOR(model)"
            )
    for name, parameter in model.named_parameters():
        why = why_not_supported(parameter) if is_sharded(parameter) else None
        if why is not None:
            raise ValueError(
                f"parameter {name!r} is a DTensor that THOR cannot train: {why}. Use fully_shard alone, or leave the "
                f"parameter to another optimizer: THOR([p for p in ...], model=model)"
            )


def leave_out_sharded(layers: dict[str, Layer], reasons: dict[int, str]) -> None:
    """Leave out the layers that cannot be preconditioned in shards.

    Args:
        layers: the layers of a model, by name; changed in place.
        reasons: why parameters are not preconditioned, by their ``id``; extended.
    """
    for name, layer in list(layers.items()):
        weight = layer.weight.parameter
        if not is_sharded(weight) or row_shards_of(weight) is None:
            continue
        why = _why_not(layer.kind, tuple(weight.shape))
        if why is not None:
            del layers[name]
            for view in (layer.weight, *layer.biases):
                reasons[id(view.parameter)] = why
        elif layer.kind.transposed:  # its G is that of all outputs, and the bias is divided among processes
            for bias in layer.biases:
                reasons[id(bias.parameter)] = "divided among processes, and the rows of the weight are inputs"
            layer.biases.clear()


def _why_not(kind: Kind, shape: tuple[int, ...]) -> str | None:
    if kind.routed or kind.groups > 1:
        return f"the weight is divided among processes, and has {kind.groups} groups with factors of their own"
    columns = math.prod(shape[1:])
    one_row = copy.copy(kind)
    setattr(one_row, "inputs" if kind.transposed else "outputs", 1)
    row = torch.arange(columns)
    try:
        matrix = one_row.to_matrix(row.view(1, *shape[1:]))
    except RuntimeError:  # it cannot be reshaped
        matrix = row
    if tuple(matrix.shape) == (1, 1, columns) and torch.equal(matrix.flatten(), row):
        return None
    return "the weight is divided among processes by its first dimension, which is no dimension of its matrix"
