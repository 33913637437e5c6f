"""What stands between a direction and a weight: decay, clipping, momentum, as pure steps over lists of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def add_weight_decay_(
    params: Sequence[Tensor], directions: Sequence[Tensor], decay: float, admitted: Sequence[bool]
) -> None:
    """Add ``decay · W`` to the directions of the parameters that decay.

    Args:
        params: the weights.
        directions: of the same shapes, changed in place.
        decay: the factor.
        admitted: which parameters decay.
    """
    chosen = [i for i, is_admitted in enumerate(admitted) if is_admitted]
    if chosen:
        torch._foreach_add_([directions[i] for i in chosen], [params[i] for i in chosen], alpha=decay)


def predicted_divergence(directions: Sequence[Tensor], gradients: Sequence[Tensor], lr: float) -> Tensor:
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
    params: Sequence[Tensor],
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
    torch._foreach_add_(list(params), directions, alpha=-lr)
