"""The deep autoencoder of the K-FAC literature (Hinton and Salakhutdinov 2006; Martens and Grosse 2015), made small."""

import itertools

from torch import nn

HIDDEN = (128, 64, 32, 12, 32, 64, 128)  # 12 numbers are the code
CODE = HIDDEN.index(min(HIDDEN))


def deep_autoencoder(pixels: int) -> nn.Module:
    """Eight linear layers with tanh between them; the code is linear, and the output are logits of pixels.

    Args:
        pixels: Numbers that an image has.

    Returns:
        The network, (N, pixels) to (N, pixels), with Glorot's uniform weights and biases of 0.
    """
    layers: list[nn.Module] = []
    widths = (pixels, *HIDDEN, pixels)
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if number not in (CODE, len(HIDDEN)):
            layers.append(nn.Tanh())
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)
