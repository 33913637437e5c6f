"""Weight-standardised convolutions: timm's ``StdConv2d`` and ``ScaledStdConv2d``, and ``WeightStandardizedConv2d``.

They convolve with ``Ŵ_i = c_i (W_i − mean W_i)``, ``c_i = gain_i · scale / √(var W_i + ε)``, for each output channel i.
With the unit vector ``n_i`` along ``W_i − mean W_i``, the gradient of W follows from that of Ŵ:

    ∇W_i = c_i (P − n_i n_iᵀ) ∇Ŵ_i        P x = x − mean x

(up to ε). P is the same for all channels, and c_i is one number per channel, so W has rows of its own: with a patch
``a`` and the gradient ``g`` of an output pixel, ``a' = P a`` and ``g'_i = c_i g_i``. The term ``n_i n_iᵀ`` is left out,
because it differs from channel to channel and has no Kronecker form. It removes the direction that changes only the
length of W_i, on which the output does not depend. For all other directions ``F = T · (A' ⊗ G')`` holds as for any
convolution.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.kinds.convolution import ConvKind

# Packages and classes whose forward is known, by name, because none of them is a dependency or imported here.
_CLASSES: Mapping[str, tuple[str, ...]] = {
    "timm": ("StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame"),
    "transformers": ("WeightStandardizedConv2d",),
}
_SAME_PADDED: Mapping[str, tuple[str, ...]] = {"timm": ("Conv2dSame",)}


class StandardisedConvKind(ConvKind):
    """A convolution with a standardised weight: patches minus their mean, gradients multiplied by ``c``."""

    solves_biases = False

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module, same=bool(getattr(module, "same_pad", False) or getattr(module, "pad", None)))
        self.label = _owner_of_forward(module).__name__
        self._module: Any = module  # eps, gain and scale are attributes of the subclasses

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the pixels of the gradient of the output, each channel multiplied by its ``c``."""
        scales = self._scales(g.dtype)
        super().add_outputs_(g, x, grad.to(scales.dtype) * scales[:, None, None], keep)

    def _samples(self, patches: Tensor) -> Tensor:
        samples = super()._samples(patches)
        return samples - samples.mean(1, keepdim=True)

    def _scales(self, dtype: torch.dtype) -> Tensor:
        """Return ``c`` for the current weight, ``(C_out,)``."""
        module = self._module
        weight = module.weight.detach().to(dtype)
        scales: Tensor = (weight.flatten(1).var(1, correction=0) + module.eps).rsqrt()
        gain = getattr(module, "gain", None)
        return scales if gain is None else scales * gain.detach().to(dtype).flatten() * module.scale


class SameConvKind(ConvKind):
    """timm's ``Conv2dSame``: a convolution that pads its input by itself."""

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module, same=True)


def is_standardised(module: nn.Module) -> bool:
    """Return whether a module is a weight-standardised convolution whose forward is known."""
    return _runs_forward_of(module, _CLASSES)


def is_same_padded(module: nn.Module) -> bool:
    """Return whether a module is timm's ``Conv2dSame``: a convolution that pads its input as TensorFlow does."""
    return _runs_forward_of(module, _SAME_PADDED)


def _runs_forward_of(module: nn.Module, classes: Mapping[str, tuple[str, ...]]) -> bool:
    owner = _owner_of_forward(module)
    known = classes.get(owner.__module__.partition(".")[0], ())
    return (
        isinstance(module, nn.Conv2d)
        and owner.__name__ in known
        and type(module)._conv_forward is nn.Conv2d._conv_forward
    )


def _owner_of_forward(module: nn.Module) -> type[nn.Module]:
    """Return the class that defines the forward of a module."""
    return next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
