"""The deep autoencoder of the K-FAC literature (Hinton and Salakhutdinov 2006; Martens and Grosse 2015), made small."""

import itertools
from collections.abc import Sequence

from torch import nn

HIDDEN = (128, 64, 32, 12, 32, 64, 128)  # 12 numbers are the code


def deep_autoencoder(pixels: int, hidden: Sequence[int] = HIDDEN) -> nn.Module:
    """Linear layers with tanh between them; the code is linear, and the outputs are logits of pixels.

    Args:
        pixels: Numbers that an image has.
        hidden: Widths between input and output; the code is the smallest.

    Returns:
        The network, (N, pixels) to (N, pixels), with Glorot's uniform weights and biases of 0.
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
