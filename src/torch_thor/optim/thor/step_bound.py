"""What keeps a step from being too long for the weights that it changes.

The natural gradient of early, low-rank factors can be many times longer than the weights: without a bound most networks
that were not tuned for it diverge within a few steps. Two bounds are known here, both applied before momentum:

- relative to each parameter (the default): ``lr · ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out)``. LARS (You et al. 2017, section 4)
  gives every layer a step of that proportion; used as a limit, it leaves a shorter natural gradient as it is.
- over all preconditioned layers (``kl_clip``): ``Σ lr² ⟨d, ∇⟩ ≤ κ`` (Ba et al. 2017, section 5).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.optim.parameters import Group

# A weight of zeros (a residual branch that starts closed, a LoRA adapter) must be able to leave zero, so its norm
# counts as at least this share of √d_out, a twentieth of what a linear layer is initialised with (√(d_out / 3)).
_SMALLEST_SHARE = 0.03


def smallest_norm(parameter: Tensor) -> float:
    """Return what a parameter's norm counts as at least.

    Args:
        parameter: a weight, its rows first, or a vector.

    Returns:
        ``0.03 √rows``, where dimensions of size 1 do not count: a vector has as many rows as numbers, whatever its
        shape, a position embedding ``(1, L, D)`` has L, a scalar has one.
    """
    for size in parameter.shape:
        if size != 1:
            return _SMALLEST_SHARE * math.sqrt(size)
    return _SMALLEST_SHARE


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of tensors that can be measured together.

    Args:
        tensors: on any devices, of any dtypes.

    Returns:
        Lists of indices, those of one device and dtype in each.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    return list(groups.values())


def relative_scales(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], lr: float, ratio: float
) -> Tensor | None:
    """Return by what each direction is to be multiplied so that no step is too long for its parameter.

    No host–device synchronisation: on an accelerator the numbers stay there.

    Args:
        parameters: the parameters, all on one device.
        directions: what momentum will take in, of the same shapes, all of one dtype.
        lr: learning rate.
        ratio: r, the longest step as a share of the parameter's norm.

    Returns:
        ``min(1, r · max(‖W‖, smallest) / (lr · ‖d‖))``, one number per parameter; None where all are known to be 1.
    """
    if directions[0].device.type == "cpu":
        scales = [relative_scale(p, d, lr, ratio) for p, d in zip(parameters, directions, strict=True)]
        return None if all(scale == 1.0 for scale in scales) else torch.tensor(scales, dtype=directions[0].dtype)
    lengths = torch.stack(list(torch._foreach_norm(list(directions)))) * lr
    # in the directions' precision: norms of half-precision weights would be rounded to 3 digits, or overflow
    norms = torch.stack(list(torch._foreach_norm(list(parameters), 2, dtype=directions[0].dtype)))
    smallest = torch.tensor([smallest_norm(p) for p in parameters], dtype=lengths.dtype, device=lengths.device)
    longest = ratio * torch.maximum(norms, smallest)
    return (longest / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)).clamp(max=1.0)


def relative_scale(parameter: Tensor, direction: Tensor, lr: float, ratio: float) -> float:
    """Return by what one direction on the CPU is to be multiplied so that the step is not too long.

    In Python's numbers, where :func:`relative_scales` has tensors of one element: half a dozen operations on those
    take as long as the norm of a small layer.

    Args:
        parameter: the parameter.
        direction: what momentum will take in, of the same shape.
        lr: learning rate.
        ratio: r, the longest step as a share of the parameter's norm.

    Returns:
        ``min(1, r · max(‖W‖, smallest) / (lr · ‖d‖))``; 1 for a direction of zeros, NaN for one with a NaN.
    """
    length = lr * _norm(direction, direction.dtype)
    longest = ratio * smallest_norm(parameter)
    if length <= longest:  # the parameter's own norm can only allow more
        return 1.0
    longest = max(longest, ratio * _norm(parameter, direction.dtype))
    return 1.0 if length <= longest else longest / length


def _norm(tensor: Tensor, dtype: torch.dtype) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=dtype))


def kl_divergence(parts: Sequence[tuple[Sequence[Tensor], Sequence[Tensor], Group]]) -> Tensor:
    """Return twice the Kullback–Leibler divergence that a step is predicted to make, ``Σ lr² ⟨d, ∇⟩``.

    Args:
        parts: directions, gradients and parameter group of all that is preconditioned.

    Returns:
        A 0-dimensional tensor.
    """
    products = [
        torch.sum(d * g) * (float(group["lr"]) ** 2 / float(group["loss_scale"]))
        for directions, gradients, group in parts
        for d, g in zip(directions, gradients, strict=True)
    ]
    return torch.stack([p.to(products[0].device) for p in products]).sum()


def kl_scale(divergence: Tensor, group: Group) -> Tensor:
    """Return what a group's directions are multiplied by, ``min(1, √(κ / Σ lr² ⟨d, ∇⟩))``.

    Args:
        divergence: what :func:`kl_divergence` returned.
        group: the parameter group; κ is its ``kl_clip``.

    Returns:
        A 0-dimensional tensor.
    """
    limit = float(group["kl_clip"]) / divergence.clamp(min=torch.finfo(divergence.dtype).tiny)
    return limit.sqrt().clamp(max=1.0)
