"""Transposed convolutions in one, two and three dimensions, as convolutions over a spread-out input."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_thor.curvature.kinds.convolution import ConvKind, windows_of
from torch_thor.curvature.kinds.patches import Reach


class ConvTransposeKind(ConvKind):
    """``nn.ConvTranspose1d`` to ``3d``: ``a`` holds the input pixels that one output pixel depends on."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.taps = math.prod(self.kernel)

    def _windows(self, x: Tensor, sizes: torch.Size) -> Tensor:
        spread = x
        if any(s > 1 for s in self.stride):
            lengths = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], self.stride, strict=True)]
            spread = x.new_zeros(*x.shape[:2], *lengths)
            places = (slice(None), slice(None), *(slice(None, None, s) for s in self.stride))
            spread[places] = x
        margins: list[int] = []  # last dimension first, as F.pad takes them; negative ones crop
        for i in reversed(range(len(self.kernel))):
            reach = self.dilation[i] * (self.kernel[i] - 1)
            before = reach - self.padding[-2 * i - 1]
            # from sizes, not from output_padding, which output_size of forward() overrides
            margins += [before, sizes[i] + reach - before - spread.shape[2 + i]]
        spread = F.pad(spread.contiguous(), margins)
        return windows_of(spread, self.kernel, self.dilation, (1,) * len(self.kernel), sizes)

    def _reached(self, x: Tensor, sizes: torch.Size) -> tuple[Tensor, list[Reach]]:
        before = self.padding[-2::-2]
        return x, [
            Reach(kernel, 1, dilation, dilation * (kernel - 1) - pad, stride)
            for kernel, stride, dilation, pad in zip(self.kernel, self.stride, self.dilation, before, strict=True)
        ]

    def _ordered(self, windows: Tensor) -> Tensor:
        return windows.flip(tuple(range(1, 1 + len(self.kernel))))
