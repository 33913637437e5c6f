"""A smaller version of the deep autoencoder of Hinton and Salakhutdinov (2006) and Martens and Grosse (2015)."""

import itertools
from collections.abc import Sequence

from torch import nn

HIDDEN = (128, 64, 32, 12, 32, 64, 128)  # the code has 12 numbers


def deep_autoencoder(pixels: int, hidden: Sequence[int] = HIDDEN) -> nn.Module:
    """Build an autoencoder of linear layers with tanh between them. The code is linear; the outputs are pixel logits.

    Args:
        pixels: Number of values per image.
        hidden: Widths of the hidden layers; the narrowest one is the code.

    Returns:
        The network, from (N, pixels) to (N, pixels). Weights are initialised by Glorot's uniform rule, biases with 0.
    """
    layers: list[nn.Module] = []
    widths, code = (pixels, *hidden, pixels), hidden.index(min(hidden))
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if number not in (code, len(hidden)):
            layers.append(nn.Tanh())
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)
