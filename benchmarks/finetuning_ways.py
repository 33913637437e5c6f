"""Ways to scale ThorMuon's learning rate for a network that is already trained.

A way is made from the model and a job before the first step, and returns before each step, when
the gradients are there, the factor of each parameter's learning rate. None of them reads names,
classes or configurations. What is known of the weights, the way that ThorMuon goes, is its own.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.polar import orthogonalise

Factors = dict[Tensor, float]
Job = dict[str, Any]
Way = Callable[[int], Factors]
AVERAGE = 0.9  # of gradients in the way "noise"


def matrices(model: nn.Module) -> Iterator[Tensor]:
    """Yield what ThorMuon orthogonalises, frozen or not."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parameter in model.parameters():
        if parameter.dim() > 1 and id(parameter) not in embeddings and min(parameter.shape[:2]) > 1:
            yield parameter


def same(model: nn.Module, job: Job) -> Way:
    """Scale nothing."""
    del job
    factors: Factors = dict.fromkeys(model.parameters(), 1.0)
    return lambda step: factors


def small(model: nn.Module, job: Job) -> Way:
    """Take small steps with matrices whose first weights are small against a step at rate 1."""
    del job
    factors: Factors = dict.fromkeys(model.parameters(), 1.0)
    for p in matrices(model):
        outputs, inputs = len(p), p[0].numel()
        norm = math.sqrt(min(outputs, inputs) * max(1.0, outputs / inputs))  # of a step at lr 1
        factors[p] = min(1.0, math.sqrt(math.sqrt(3) * float(p.detach().norm()) / norm))
    return lambda step: factors


def noise(model: nn.Module, job: Job) -> Way:
    """Scale each parameter's step by the root of the share of signal in its mean gradient.

    The mean of gradients that are noise alone has a share of (1 - AVERAGE) / (1 + AVERAGE) of their
    squared length. The job gives the least factor.
    """
    means: dict[Tensor, Tensor] = {}
    squares: defaultdict[Tensor, float] = defaultdict(float)
    of_noise = (1 - AVERAGE) / (1 + AVERAGE)

    def factors(step: int) -> Factors:
        found: Factors = {}
        unbiased = 1 - AVERAGE ** (step + 1)
        for p in model.parameters():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            means[p] = means.get(p, torch.zeros_like(p)).lerp(gradient, 1 - AVERAGE)
            squares[p] += (1 - AVERAGE) * (float(gradient.square().sum()) - squares[p])
            length = float((means[p] / unbiased).square().sum())
            share = length * unbiased / squares[p] if squares[p] else 0.0
            signal = min(1.0, max(0.0, share - of_noise) / (1 - of_noise))
            found[p] = max(job["least"], math.sqrt(signal)) if step else job["least"]
        return found

    return factors


def distance(model: nn.Module, job: Job) -> Way:
    """Take the largest distance so far that the gradients prove, as Prodigy does.

    D-Adaptation (Defazio and Mishchenko 2023) bounds the distance to the solution from below by
    the sum of rate · ⟨gradient, first weights - weights⟩ over the dual norm of the sum of rate ·
    gradient. A step of ThorMuon is one of length 1 in the largest singular value (of AdamW inside,
    of 0.2 in the largest entry), whose dual norm is the sum of the singular values (of the
    entries). The job gives the first factor; 1 is the greatest.
    """
    start: dict[Tensor, Tensor] = {p: p.detach().clone() for p in model.parameters()}
    sums = {p: torch.zeros_like(p) for p in start}
    whole = set(matrices(model))
    proven, best = 0.0, float(job["first"])

    def dual_norm() -> float:
        wide = [p for p in whole if p.requires_grad]
        flat = [sums[p].flatten(1) for p in wide]
        flat = [m if m.shape[0] <= m.shape[1] else m.mT.contiguous() for m in flat]
        polars = [orthogonalise([m[None]])[0][0] for m in flat]
        shapes = [math.sqrt(max(1.0, len(p) / p[0].numel())) for p in wide]
        of_matrices = sum(
            shape * float((m * polar).sum())
            for m, polar, shape in zip(flat, polars, shapes, strict=True)
        )
        rest = sum(float(total.abs().sum()) for p, total in sums.items() if p not in whole)
        return of_matrices + 0.2 * rest

    def factors(step: int) -> Factors:
        nonlocal proven, best
        for p, first in start.items():
            if p.grad is not None:
                proven += best * float((p.grad * (first - p.detach())).sum())
                sums[p] += best * p.grad
        if step:
            best = min(1.0, max(best, proven / dual_norm() / job["rate"]))
        return dict.fromkeys(model.parameters(), best)

    return factors


WAYS: dict[str, Callable[[nn.Module, Job], Way]] = {
    "same": same,
    "small": small,
    "noise": noise,
    "distance": distance,
}
