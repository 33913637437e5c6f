"""A third optimizer with Kronecker factors: natural gradient descent with THOR's refresh.

It is all that an optimizer needs: a class with its options and its step, and a line in a registry
(`torch_thor.optim.registry`).
"""

from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.natural import buckets_of, natural_gradients
from torch_thor.optim.update import subtract_
from torch_thor.optim.works import in_buckets


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

    def _update(self, binding, found_inf):
        for work, d in natural_gradients(in_buckets(binding.buckets(buckets_of))):
            subtract_(work.weights, d, float(work.group["lr"]), found_inf)
