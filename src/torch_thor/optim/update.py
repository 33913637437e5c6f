"""The parts of a step that THOR and ThorMuon share: momentum, decay, bound and subtraction.

On a CPU the gradients of a step have been checked before. On an accelerator nothing waits for the
check: ``unless`` is a tensor, 1 where a gradient is not finite. Whatever changes a weight or its
state is then a kernel of torch's fused optimizers, which changes nothing in that case; they have it
for ``torch.amp.GradScaler``.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torch_thor.optim.works import Work
from torch_thor.torch_internals import fused_sgd_

Directions = Iterator[tuple[Work, list[Tensor]]]  # what a step is to follow, work by work


def momentum_(work: Work, directions: list[Tensor], unless: Tensor | None = None) -> list[Tensor]:
    """Compute ``v ← μ v + d``, and return v, or with Nesterov's look-ahead ``d + μ v``."""
    velocities, momentum = work.moments[0], float(work.group["momentum"])
    if unless is not None:
        _fused_sgd_(velocities, directions, -1.0, momentum - 1.0, unless)  # v + (d + (μ - 1) v)
    else:
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, directions)
    if not work.group["nesterov"]:
        return velocities
    return list(torch._foreach_add(directions, velocities, alpha=momentum))


def shrink_(weights: list[Tensor], share: float, unless: Tensor | None = None) -> None:
    """Compute ``W ← (1 - share) W``."""
    if not share:
        return
    if unless is None:
        torch._foreach_mul_(weights, 1 - share)
    else:
        torch._foreach_mul_(weights, 1 - share * (1 - unless.to(weights[0].dtype)))


def subtract_(
    weights: list[Tensor], steps: list[Tensor], lr: float, unless: Tensor | None = None
) -> None:
    """Compute ``W ← W - lr · s``."""
    if unless is None:
        torch._foreach_add_(weights, steps, alpha=-lr)
    else:
        _fused_sgd_(weights, steps, lr, 0.0, unless)


def _fused_sgd_(
    targets: list[Tensor], steps: list[Tensor], lr: float, decay: float, unless: Tensor
) -> None:
    """Compute ``x ← x - lr · (s + decay · x)``, unless a number on the device is 1."""
    # One kernel does it for all tensors.
    fused_sgd_(
        targets,
        steps,
        [],
        weight_decay=decay,
        momentum=0.0,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=unless,
    )


def trust_ratios(
    norms: list[Tensor],
    smallest: Sequence[float],
    factors: Sequence[float],
    lengths: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return ``min(1, factor · max(norm, smallest) / length)`` of each matrix."""
    # ``norms`` is overwritten; ``lengths`` are None where the factors contain them
    torch._foreach_maximum_(norms, smallest)
    torch._foreach_mul_(norms, factors)
    if lengths is not None:
        torch._foreach_div_(norms, list(lengths))
    torch._foreach_clamp_max_(norms, 1.0)
    return norms


# ---- the parts of THOR's step, work by work ------------------------------------------------------


def with_decay(directions: Directions) -> Directions:
    """Add ``weight_decay · W``."""
    for work, d in directions:
        decay = float(work.group["weight_decay"])
        if decay:
            torch._foreach_add_(d, work.weights, alpha=decay)
        yield work, d


def with_momentum(directions: Directions, unless: Tensor | None) -> Directions:
    """Add directions to the momentum, as ``torch.optim.SGD`` does."""
    for work, d in directions:
        momentum = float(work.group["momentum"])
        # one pass over memory, with one rounding; SGD's two take two
        if momentum and work.layout is not None:
            v = work.moments[0][0]
            d = [torch.add(d[0], v, alpha=momentum, out=v)]
        elif momentum:
            d = momentum_(work, d, unless)
        yield work, d
