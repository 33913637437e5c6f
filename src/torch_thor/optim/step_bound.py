"""Bounds on the length of a step.

The natural gradient of early, low-rank factors can be many times longer than the weights, and without a bound most
networks that were not tuned for it diverge within a few steps. There are two bounds, both applied before momentum:

- relative to each parameter (the default): ``lr · ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out)``. LARS (You et al. 2017, section 4)
  gives every layer a step of that proportion; used as a limit, it leaves a shorter natural gradient as it is.
- over all preconditioned layers (``kl_clip``): ``Σ lr² ⟨d, ∇⟩ ≤ κ`` (Ba et al. 2017, section 5).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.optim.parameters import Group

# A weight of zeros (a zero-initialised residual branch, a LoRA adapter) must be able to move, so its norm counts as at
# least this number times √d_out. That is a twentieth of the norm of a newly initialised linear layer, √(d_out / 3).
SMALLEST_SHARE = 0.03


def smallest_norm(parameter: Tensor) -> float:
    """Return the smallest norm that is assumed for a parameter."""
    for size in parameter.shape:
        if size != 1:
            return SMALLEST_SHARE * math.sqrt(size)
    return SMALLEST_SHARE


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group tensors that can be measured together."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    return list(groups.values())


def relative_scales(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], lr: float, ratio: float
) -> Tensor | None:
    """Return the factors by which directions are multiplied so that no step is too long for its parameter."""
    if directions[0].device.type == "cpu":
        scales = [relative_scale(p, d, lr, ratio) for p, d in zip(parameters, directions, strict=True)]
        return None if all(scale == 1.0 for scale in scales) else torch.tensor(scales, dtype=directions[0].dtype)
    lengths = torch.stack(list(torch._foreach_norm(list(directions)))) * lr
    # in the dtype of the directions: a norm in half precision has 3 digits and may overflow
    norms = torch.stack(list(torch._foreach_norm(list(parameters), 2, dtype=directions[0].dtype)))
    smallest = torch.tensor([smallest_norm(p) for p in parameters], dtype=lengths.dtype, device=lengths.device)
    longest = ratio * torch.maximum(norms, smallest)
    return (longest / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)).clamp(max=1.0)


def relative_scale(parameter: Tensor, direction: Tensor, lr: float, ratio: float) -> float:
    """Return the factor by which a direction on the CPU is multiplied so that the step is not too long."""
    length = lr * _norm(direction, direction.dtype)
    longest = ratio * smallest_norm(parameter)
    if length <= longest:  # then the norm of the parameter, which can only raise the bound, is not needed
        return 1.0
    longest = max(longest, ratio * _norm(parameter, direction.dtype))
    return 1.0 if length <= longest else longest / length


def _norm(tensor: Tensor, dtype: torch.dtype) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=dtype))


def kl_divergence(parts: Sequence[tuple[Sequence[Tensor], Sequence[Tensor], Group]]) -> Tensor:
    """Return ``Σ lr² ⟨d, ∇⟩``, twice the Kullback–Leibler divergence that is predicted for a step."""
    products = [
        torch.sum(d * g) * (float(group["lr"]) ** 2 / float(group["loss_scale"]))
        for directions, gradients, group in parts
        for d, g in zip(directions, gradients, strict=True)
    ]
    return torch.stack([p.to(products[0].device) for p in products]).sum()


def kl_scale(divergence: Tensor, group: Group) -> Tensor:
    """Return the factor by which the directions of a group are multiplied, ``min(1, √(κ / Σ lr² ⟨d, ∇⟩))``."""
    limit = float(group["kl_clip"]) / divergence.clamp(min=torch.finfo(divergence.dtype).tiny)
    return limit.sqrt().clamp(max=1.0)
