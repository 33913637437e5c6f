"""A third optimizer with Kronecker factors: natural gradient descent with THOR's refresh.

It is all that an optimizer needs: a class with its options and its step, and a line in a registry
(`torch_thor.optim.registry`).
"""

import torch

from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.natural import batches_of, natural_gradients


class NaturalSGD(CurvatureOptimizer):
    """``W ← W - lr · (1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹``."""

    def __init__(
        self,
        params,
        lr=0.02,
        damping=0.05,
        *,
        update_interval=3,
        split_dim=8,
        model=None,
        layers=None,
        distributed=None,
    ):
        super().__init__(params, model, locals())

    def _update(self, binding):
        for batch, d in natural_gradients(binding.batches(batches_of)):
            torch._foreach_add_(batch.weights, d, alpha=-float(batch.group["lr"]))
