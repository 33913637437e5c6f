"""What stands between a direction and a weight: decay, clipping, momentum, as pure steps over lists of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def add_weight_decay(
    params: list[Tensor], directions: list[Tensor], decay: float, admitted: Sequence[bool]
) -> list[Tensor]:
    """Return ``d + decay · W`` where admitted, ``d`` elsewhere.

    Args:
        params: the weights.
        directions: of the same shapes; not changed (a plain parameter's direction is its gradient).
        decay: the factor; 0 returns the directions as they are.
        admitted: which parameters decay.

    Returns:
        The new directions.
    """
    result = list(directions)
    chosen = [i for i, is_admitted in enumerate(admitted) if is_admitted]
    if decay and chosen:
        decayed = torch._foreach_add([result[i] for i in chosen], [params[i] for i in chosen], alpha=decay)
        for i, direction in zip(chosen, decayed, strict=True):
            result[i] = direction
    return result


def predicted_divergence(directions: list[Tensor], gradients: Sequence[Tensor], lr: float) -> Tensor:
    """Return ``lr² Σ ⟨d, ∇⟩``, twice the KL divergence that a natural-gradient step is predicted to make.

    Args:
        directions: natural gradients, weight decay included.
        gradients: of the same shapes.
        lr: learning rate.

    Returns:
        A scalar on the first direction's device.
    """
    device = directions[0].device  # layers may sit on several
    products = [torch.sum(d * g).to(device) for d, g in zip(directions, gradients, strict=True)]
    return torch.stack(products).sum() * lr**2


def momentum_step(
    params: list[Tensor],
    directions: list[Tensor],
    buffers: list[Tensor],
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """``v ← μ v + d``, then ``W ← W − lr · v`` (Nesterov: ``W ← W − lr · (d + μ v)``), as torch.optim.SGD rounds it.

    Args:
        params: weights, changed in place.
        directions: ``d``.
        buffers: ``v``, changed in place; empty where momentum is 0.
        lr: learning rate.
        momentum: μ.
        nesterov: the second form.
    """
    if momentum:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, directions)
        directions = list(torch._foreach_add(directions, buffers, alpha=momentum)) if nesterov else buffers
    torch._foreach_add_(params, directions, alpha=-lr)
