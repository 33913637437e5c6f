"""Fused experts written out: E layers, each with rows and a T of its own."""

import torch
from torch import nn

from reference.layers import Layer


def expert_layers(
    model: nn.Module, name: str, weights: tuple[str, ...], *, inputs_first: bool = False
):
    """The layers of every expert of some 3-d weights, as parts of their parameters."""
    module = model.get_submodule(name)
    layers = {}
    for attribute in weights:
        for e in range(len(getattr(module, attribute))):
            mine, bias = slice(e, e + 1), f"{attribute}_bias"
            biases = {f"{name}.{bias}": mine} if getattr(module, bias, None) is not None else {}
            call = f"{name}.{attribute}.{e}"
            layers[call] = Layer(None, f"{name}.{attribute}", mine, biases, [call], inputs_first)
    return layers


def expert_by_hand(
    module: nn.Module, name: str, attribute: str, e: int, x: torch.Tensor, *, inputs_first: bool
):
    """One expert's product, and what was seen of it: (y, [(layer, x, y)])."""
    weight, bias = getattr(module, attribute)[e], getattr(module, f"{attribute}_bias", None)
    y = x @ (weight if inputs_first else weight.T)
    if bias is not None:
        y = y + bias[e]
    return y, [(f"{name}.{attribute}.{e}", x, y)]
