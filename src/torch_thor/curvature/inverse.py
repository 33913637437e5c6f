"""Damped inverses of many block-diagonal factors at once.

Blocks of one size, from all layers, go through one batched Cholesky factorisation: a few large launches in the place
of hundreds of small ones, which is what the split is for (Chen et al. 2021, section 3.3).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.precision import ieee_float32

# A block that is not positive definite gets ten times its damping, and again, before it is given up.
DAMPING_RAISES = (1.0, 10.0, 100.0)
# What stands in the place of the index of a raise where none has worked.
_NOT_POSITIVE = len(DAMPING_RAISES)


@dataclass
class Inverse:
    """The damped inverse of one factor, and what it took.

    Args:
        matrix: ``(M + damping I)⁻¹``, block by block, row-major; meaningless where ``failed``.
        raised: the damping of some block had to be raised.
        failed: some block was not positive definite even so, or its inverse is not finite.
    """

    matrix: BlockDiagonal
    raised: bool
    failed: bool


def damped_inverses(factors: Sequence[tuple[BlockDiagonal, float | Tensor]]) -> list[Inverse]:
    """Invert every block of every factor, those of one size in one batch.

    Args:
        factors: pairs of a factor and what is added to its diagonal (``√(λ/T)``): a number, or one for each of its
            groups, ``(groups,)``.

    Returns:
        One result a factor, in order.
    """
    batches: defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[int, int, Tensor, Tensor]]] = defaultdict(
        list
    )
    inverted: list[list[Tensor]] = []
    for i, (factor, damping) in enumerate(factors):
        parts = factor.parts()
        inverted.append(list(parts))  # each to be replaced by its inverse
        for j, part in enumerate(parts):
            if isinstance(damping, Tensor):
                of_blocks = damping.repeat_interleave(len(part) // factor.layout.groups)
            else:
                of_blocks = part.new_full((len(part),), damping)
            batches[part.shape[-1], part.dtype, part.device].append((i, j, part, of_blocks))
    owners: list[int] = []  # the factor of each part
    levels: list[Tensor] = []  # the highest index of a damping raise in each part
    for (_, _, device), members in batches.items():
        rows, columns, parts_, dampings = zip(*members, strict=True)
        with ieee_float32(device.type):
            inverse, level = _invert_batch(torch.cat(parts_), torch.cat(dampings))
        first = 0
        for i, j, part in zip(rows, columns, parts_, strict=True):
            # A slice is a view of the batch; a layer must not keep the whole batch alive, nor save it with its state.
            # Row-major, which LAPACK's results are not: checkpoints may not keep strides, and products round by them.
            inverted[i][j] = inverse[first : first + len(part)].clone(memory_format=torch.contiguous_format)
            owners.append(i)
            levels.append(level[first : first + len(part)].amax())
            first += len(part)
    worst = [0] * len(factors)
    on_host = torch.stack([level.to(levels[0].device) for level in levels]).tolist() if levels else []
    for i, level_of in zip(owners, on_host, strict=True):
        worst[i] = max(worst[i], int(level_of))
    results = []
    for (factor, _), matrices, level_of in zip(factors, inverted, worst, strict=True):
        results.append(Inverse(factor.with_parts(matrices), level_of > 0, level_of == _NOT_POSITIVE))
    return results


def relative_damping(factor: BlockDiagonal, damping: float) -> Tensor:
    """Return what is added to the diagonal where damping is relative to the factor.

    Args:
        factor: the factor.
        damping: λ, as a share.

    Returns:
        ``λ · tr(M) / n`` of each group, ``(groups,)``; λ for a factor of zeros (a layer whose inputs have vanished),
        and for one whose squares are so small that most of their digits are lost.
    """
    means = factor.group_traces() / factor.layout.size
    least = torch.finfo(means.dtype).tiny / torch.finfo(means.dtype).eps
    return damping * torch.where(means.abs() > least, means, torch.ones_like(means))


def _invert_batch(blocks: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses ``(count, s, s)`` and, for each block, the index of the damping raise that worked."""
    raises = torch.tensor(DAMPING_RAISES, dtype=blocks.dtype, device=blocks.device)
    damped = blocks.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    factor, info = _cholesky(damped)
    level = torch.zeros_like(info)
    for attempt in range(1, len(DAMPING_RAISES)):
        bad = info.nonzero().flatten()  # a wait for the device, once a refresh: most often it is empty
        if not len(bad):
            break
        retry = blocks[bad]
        retry.diagonal(dim1=-2, dim2=-1).add_((damping[bad] * raises[attempt])[:, None])
        factor[bad], info[bad] = _cholesky(retry)
        level[bad] = attempt
    inverse = _from_cholesky(factor, info == 0)
    good = (info == 0) & inverse.isfinite().flatten(1).all(-1)
    return inverse, torch.where(good, level, _NOT_POSITIVE)


def _from_cholesky(factor: Tensor, good: Tensor) -> Tensor:
    """Return the inverses of the good blocks, zeros for the others."""
    if factor.shape[-1] == 1:
        return torch.where(good[:, None, None], factor.square().reciprocal(), 0.0)
    if bool(good.all()):  # a wait for the device, once a refresh
        return torch.cholesky_inverse(factor)
    # one half-finished factor with a zero on its diagonal, and cholesky_inverse raises for the whole batch
    inverse = torch.zeros_like(factor)
    if bool(good.any()):
        inverse[good] = torch.cholesky_inverse(factor[good])
    return inverse


def _cholesky(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors and, for each block, 0 or a positive number if it is not positive definite."""
    if blocks.shape[-1] > 1:
        factor, info = torch.linalg.cholesky_ex(blocks)
        return factor, info
    # a vocabulary's worth of 1 x 1 blocks: LAPACK would be called for each
    return blocks.sqrt(), (~(blocks > 0)).flatten().int()
