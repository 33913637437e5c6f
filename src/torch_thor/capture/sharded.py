"""Which layers can be preconditioned if the rows of their weights are divided among processes (FSDP2 and HSDP).

A weight is divided by its first dimension. If a slice of that dimension is a row of G, or of A where the weight has the
inputs first, every process preconditions its own rows. Other layers are trained without curvature, and listed so.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from torch_thor.capture.layers import Layer
from torch_thor.curvature.shards import why_not_by_rows
from torch_thor.distributed.sharded_parameters import (
    is_fully_sharded,
    is_sharded,
    row_shards_of,
    why_not_supported,
)


def check_sharded(model: nn.Module, trained: Iterable[Tensor]) -> None:
    """Raise an error for a parameter that is divided in a way that THOR does not support."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"module {name or 'itself'!r} is a FullyShardedDataParallel, which puts the parameters of several "
                f"layers into one; use its successor torch.distributed.fsdp.fully_shard, then THOR(model)"
            )
    own = {id(parameter) for parameter in trained}
    of_fsdp = {id(p) for module in model.modules() if is_fully_sharded(module) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        why = None
        if id(parameter) in own and is_sharded(parameter):
            why = why_not_supported(parameter, of_fsdp=id(parameter) in of_fsdp)
        if why is not None:
            raise ValueError(
                f"parameter {name!r} is a DTensor that THOR cannot train: {why}. Use fully_shard alone and pass the "
                f"model that it was given, or leave the parameter to another optimizer: THOR([p for p in ...], "
                f"model=model)"
            )


def leave_out_sharded(layers: dict[str, Layer], reasons: dict[int, str]) -> None:
    """Leave out the layers that cannot be preconditioned in shards."""
    for name, layer in list(layers.items()):
        weight = layer.weight.parameter
        if not is_sharded(weight) or row_shards_of(weight) is None:
            continue
        why = why_not_by_rows(layer.kind, tuple(weight.shape))
        if why is not None:
            del layers[name]
            for view in (layer.weight, *layer.biases):
                reasons[id(view.parameter)] = why
        elif layer.kind.transposed:  # its G is that of all outputs, and the bias is divided among processes
            for bias in layer.biases:
                reasons[id(bias.parameter)] = "divided among processes, and the rows of the weight are inputs"
            layer.biases.clear()
