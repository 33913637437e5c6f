"""Rows of the input and of the output's gradient, spelt out for every kind of layer."""

from itertools import product

import numpy as np
from torch import nn

CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d
TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
CALLED = nn.Linear | CONVOLUTIONS | TRANSPOSED | nn.Embedding
STANDARDISED = (
    "StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame",
    "WeightStandardizedConv2d"
)  # fmt: skip
SAME_PADDED = ("StdConv2dSame", "ScaledStdConv2dSame", "Conv2dSame", "WeightStandardizedConv2d")


def is_standardised(module: nn.Module | None) -> bool:
    """A convolution with a weight whose rows have been given mean 0 and variance 1."""
    return type(module).__name__ in STANDARDISED


def is_inputs_first(module: nn.Module | None) -> bool:
    """The linear layer of GPT-2, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D"


def places(sizes) -> list[tuple[int, ...]]:
    """Every index of an array of these sizes, in the order of its memory."""
    return list(product(*(range(size) for size in sizes)))


def batched(x: np.ndarray, conv: nn.Module) -> np.ndarray:
    """(N, C, *L), also of a single image."""
    return x if x.ndim == len(conv.kernel_size) + 2 else x[None]


def padded_input(x: np.ndarray, conv: nn.Module) -> np.ndarray:
    """(N, C, *L) with the margins that the convolution sees."""
    steps = zip(x.shape[2:], conv.kernel_size, conv.stride, conv.dilation, strict=True)
    if type(conv).__name__ in SAME_PADDED and not any(conv.padding):
        # for ⌈n / stride⌉ pixels
        totals = [max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0) for n, k, s, d in steps]
    elif conv.padding == "valid":
        totals = [0 for _ in steps]
    elif conv.padding == "same":
        totals = [d * (k - 1) for _, k, _, d in steps]
    else:
        totals = [2 * margin for margin in conv.padding]
    # an odd number has more to the right and below
    margins = [(total // 2, total - total // 2) for total in totals]
    mode = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}[
        conv.padding_mode
    ]
    return np.pad(x, [(0, 0), (0, 0), *margins], mode=mode)


def conv_input_rows(x: np.ndarray, conv: nn.Module, group: int) -> np.ndarray:
    """Every patch that a group of the convolution looks at, in the order of `weight.flatten(1)`."""
    x = padded_input(batched(x, conv), conv)
    width = x.shape[1] // conv.groups
    steps = list(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True))
    sizes = [
        (n - d * (k - 1) - 1) // s + 1 for n, (k, s, d) in zip(x.shape[2:], steps, strict=True)
    ]
    rows = []
    for image in x:
        for place in places(sizes):
            row = []
            for channel in range(group * width, (group + 1) * width):
                for tap in places(conv.kernel_size):
                    pixel = tuple(
                        p * s + t * d for p, t, (_, s, d) in zip(place, tap, steps, strict=True)
                    )
                    row.append(image[(channel, *pixel)])
            rows.append(row)
    return np.array(rows)


def transposed_input_rows(
    x: np.ndarray, conv: nn.Module, group: int, sizes: tuple[int, ...]
) -> np.ndarray:
    """What each pixel of the output is a weighted sum of: the input's pixels, scattered by taps.

    y[p · stride − padding + t · dilation] += W[channel, :, t] x[channel, p]: so x[channel, p]
    stands in the row of that output pixel, at (channel, t).
    """
    x = batched(x, conv)
    width = x.shape[1] // conv.groups
    rows = []
    for image in x:
        seen = {place: np.zeros((width, *conv.kernel_size)) for place in places(sizes)}
        for pixel in places(image.shape[1:]):
            for tap in places(conv.kernel_size):
                place = tuple(
                    p * s - m + t * d
                    for p, t, s, m, d in zip(
                        pixel, tap, conv.stride, conv.padding, conv.dilation, strict=True
                    )
                )
                if place in seen:
                    for channel in range(width):
                        seen[place][(channel, *tap)] += image[(group * width + channel, *pixel)]
        rows += [patch.ravel() for patch in seen.values()]
    return np.array(rows)


def conv_output_rows(grad_y: np.ndarray, conv: nn.Module, group: int) -> np.ndarray:
    """The gradient by every output position, for the output channels of one group."""
    width = conv.out_channels // conv.groups
    rows = []
    for image in batched(grad_y, conv):
        for place in places(image.shape[1:]):
            rows.append(
                [image[(channel, *place)] for channel in range(group * width, (group + 1) * width)]
            )
    return np.array(rows)


def standardised_rows(a: np.ndarray, g: np.ndarray, conv: nn.Module, group: int):
    """Rows of the weight that is trained, from rows of the weight that convolves.

    That is W_i / its deviation, times a gain.
    """
    centred = np.array([row - sum(row) / len(row) for row in a])
    width = conv.out_channels // conv.groups
    scales = []
    for channel in range(group * width, (group + 1) * width):
        taps = conv.weight[channel].detach().numpy().ravel()
        mean = sum(taps) / len(taps)
        variance = sum((tap - mean) ** 2 for tap in taps) / len(taps)
        gain = conv.gain[channel].item() * conv.scale if hasattr(conv, "gain") else 1.0
        scales.append(gain / np.sqrt(variance + conv.eps))
    return centred, np.array([row * scales for row in g])


def convolution_rows(x: np.ndarray, grad_y: np.ndarray, conv: nn.Module, group: int):
    """Rows of one group of any convolution."""
    if isinstance(conv, TRANSPOSED):
        a = transposed_input_rows(x, conv, group, batched(grad_y, conv).shape[2:])
    else:
        a = conv_input_rows(x, conv, group)
    g = conv_output_rows(grad_y, conv, group)
    return standardised_rows(a, g, conv, group) if is_standardised(conv) else (a, g)


def embedding_rows(tokens: np.ndarray, grad_y: np.ndarray, embedding: nn.Embedding):
    """One-hot vectors; a padding token is no row.

    The output of a scaled embedding is its vector times a number.
    """
    rows, outputs = [], []
    scale = float(getattr(embedding, "embed_scale", 1.0))
    for token, g in zip(tokens.ravel(), grad_y.reshape(tokens.size, -1), strict=True):
        if token == embedding.padding_idx:
            continue
        one_hot = np.zeros(embedding.num_embeddings)
        one_hot[token] = 1.0
        rows.append(one_hot)
        outputs.append(scale * g)
    return np.array(rows), np.array(outputs)


def rows_of(
    module: nn.Module | None, x: np.ndarray, grad_y: np.ndarray, mask: np.ndarray | None = None
):
    """(rows of the input, rows of the output's gradient) for each group.

    None stands for any linear layer. A mask leaves out rows of whatever has its leading dimensions.
    """
    if is_standardised(module) or isinstance(module, CONVOLUTIONS | TRANSPOSED):
        return [convolution_rows(x, grad_y, module, q) for q in range(module.groups)]
    leading = x.shape if isinstance(module, nn.Embedding) else x.shape[:-1]
    if mask is not None and mask.shape == leading:
        x, grad_y = x[mask], grad_y[mask]
    if isinstance(module, nn.Embedding):
        return [embedding_rows(x, grad_y, module)]
    assert module is None or isinstance(module, nn.Linear) or is_inputs_first(module)
    return [(x.reshape(-1, x.shape[-1]), grad_y.reshape(-1, grad_y.shape[-1]))]
