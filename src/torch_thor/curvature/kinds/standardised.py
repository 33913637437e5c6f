"""Weight-standardised convolutions of timm, and ``WeightStandardizedConv2d``.

Those of timm are ``StdConv2d`` and ``ScaledStdConv2d``.

They convolve with ``Ŵ_i = c_i (W_i − mean W_i)``, ``c_i = gain_i · scale / √(var W_i + ε)``, for
each output channel i. With the unit vector ``n_i`` along ``W_i − mean W_i``, the gradient of W
follows from the gradient of Ŵ:

    ∇W_i = c_i (P − n_i n_iᵀ) ∇Ŵ_i        P x = x − mean x

(up to ε). P is the same for all channels, and c_i is one number per channel, so W has rows of its
own: with a patch ``a`` and the gradient ``g`` of an output pixel, ``a' = P a`` and
``g'_i = c_i g_i``. The term ``n_i n_iᵀ`` is left out, because it differs from channel to channel
and has no Kronecker form. It removes the direction that changes only the length of W_i, on which
the output does not depend. For all other directions ``F = T · (A' ⊗ G')`` holds as for any
convolution.
"""

from typing import Any

from torch import Tensor

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.kinds.matrix import ConvKind
from torch_thor.curvature.kinds.registry import owner_of_forward


class StandardisedConvKind(ConvKind):
    """A convolution with a standardised weight.

    Its patches are taken minus their mean, and its gradients multiplied by ``c``.
    """

    solves_biases = False

    def __init__(self, module: Any) -> None:
        super().__init__(
            module, same=bool(getattr(module, "same_pad", False) or getattr(module, "pad", None))
        )
        self.label = owner_of_forward(module).__name__
        self._module = module

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the pixels of the gradient of the output, each channel multiplied by its ``c``."""
        module, weight = self._module, self._module.weight.detach().to(g.rows.dtype)
        scales: Tensor = (weight.flatten(1).var(1, correction=0) + module.eps).rsqrt()
        if (gain := getattr(module, "gain", None)) is not None:
            scales = scales * gain.detach().to(g.rows.dtype).flatten() * module.scale
        super().add_outputs_(g, x, grad.to(g.rows.dtype) * scales[:, None, None], keep)

    def _samples(self, patches: Tensor) -> Tensor:
        samples = super()._samples(patches)
        return samples - samples.mean(1, keepdim=True)
