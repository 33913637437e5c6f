"""Adaptive gradient clipping with explicit loops, in float64. What a unit is, is found by trying.

A number of a weight belongs to the output that changes with it: the weight is set to zero but for
this number, and the layer is run on ones. Nothing here knows where PyTorch keeps the outputs of
which layer.
"""

import copy
import math

import numpy as np
import torch


def output_of_each_number(module, size):
    """For each number of `module.weight`, in its shape, the output channel that it feeds.

    `size` is the size of the input.
    """
    channel_dim = 1 if len(size) > 2 else -1
    found = np.zeros(module.weight.shape, dtype=int)
    module = copy.deepcopy(module)
    with torch.no_grad():
        if module.bias is not None:
            module.bias.zero_()
        for index in np.ndindex(*module.weight.shape):
            module.weight.zero_()
            module.weight[index] = 1
            output = module(torch.ones(size, dtype=module.weight.dtype))
            channels = output.movedim(channel_dim, 0)
            (channel,) = [c for c, values in enumerate(channels) if values.any()]
            found[index] = channel
    return found


def rows_of_dim_0(shape):
    """The rule where nothing is known of the layer: dim 0; a vector as a whole."""
    if len(shape) <= 1:
        return np.zeros(shape, dtype=int)
    return np.broadcast_to(np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)), shape)


def clipped(weight, gradient, units, clip_factor, eps):
    """(clipped gradient, number of clipped units), number by number."""
    sums = {}
    for index in np.ndindex(*gradient.shape):
        total = sums.setdefault(int(units[index]), [0.0, 0.0])
        total[0] += abs(complex(weight[index])) ** 2
        total[1] += abs(complex(gradient[index])) ** 2
    factors = {}
    for unit, (of_weight, of_gradient) in sums.items():
        ratio = math.sqrt(of_gradient) / max(math.sqrt(of_weight), eps)
        factors[unit] = clip_factor / ratio if ratio > clip_factor else 1.0
    result = np.array(gradient, dtype=complex if np.iscomplexobj(gradient) else float)
    for index in np.ndindex(*gradient.shape):
        result[index] *= factors[int(units[index])]
    return result, sum(factor != 1.0 for factor in factors.values())


def gradients_of(model, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        numbers = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        # gradients of very unlike sizes, unit by unit and parameter by parameter
        p.grad = (scale * numbers * torch.rand(1, generator=generator).pow(3)).to(p.dtype)
