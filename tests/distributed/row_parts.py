"""Linear layers as one layer for each shard of their rows: a process whose blocks end where FSDP2's
shards end.
"""

import torch
from torch import nn


class RowParts(nn.Module):
    """A linear layer whose parts have bounds and blocks of their own."""

    def __init__(self, layer, world):
        super().__init__()
        weights = layer.weight.detach().chunk(world)
        biases = [None] * world if layer.bias is None else layer.bias.detach().chunk(world)
        self.parts = nn.ModuleList()
        for weight, bias in zip(weights, biases, strict=False):
            part = nn.Linear(
                weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype
            )
            part.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
            self.parts.append(part)

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], dim=-1)


def in_row_parts(model, world):
    """Replace all linear layers."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, RowParts(module, world))
    return model
