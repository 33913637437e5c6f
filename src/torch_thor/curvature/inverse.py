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
# In the place of the index of a damping raise, where none has worked.
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


# the inverse to be, whether the part is its blocks or its tail, the part, and what is added to each of its diagonals
_Part = tuple[Inverse, bool, Tensor, Tensor]


def damped_inverses(factors: Sequence[tuple[BlockDiagonal, float | Tensor]]) -> list[Inverse]:
    """Invert every block of every factor, those of one size in one batch.

    Args:
        factors: pairs of a factor and what is added to its diagonal (``√(λ/T)``): a number, or one for each of its
            groups, ``(groups,)``.

    Returns:
        One result per factor, in order.
    """
    batches: defaultdict[tuple[int, torch.dtype, torch.device], list[_Part]] = defaultdict(list)
    results: list[Inverse] = []
    for factor, damping in factors:
        result = Inverse(BlockDiagonal(factor.layout, factor.blocks, factor.tail), raised=False, failed=False)
        results.append(result)
        for part in factor.parts():
            count = part.shape[0]
            if isinstance(damping, Tensor):
                of_blocks = damping.repeat_interleave(count // factor.layout.groups)
            else:
                of_blocks = part.new_full((count,), damping)
            batches[part.shape[-1], part.dtype, part.device].append((result, part is factor.blocks, part, of_blocks))
    levels: list[Tensor] = []  # of each batch: which damping raise worked, block by block
    highest: list[Tensor] = []
    for (_, _, device), members in batches.items():
        results_of, are_blocks, parts, dampings = zip(*members, strict=True)
        with ieee_float32(device.type):
            inverse, level = _invert_batch(torch.cat(parts), torch.cat(dampings))
        levels.append(level)
        highest.append(level.amax().to(levels[0].device))
        first = 0
        for result, is_blocks, part in zip(results_of, are_blocks, parts, strict=True):
            # A slice is a view of the batch; a layer must not keep the whole batch alive, nor save it with its state.
            # Row-major, which LAPACK's results are not: checkpoints may not keep strides, and products round by them.
            last = first + part.shape[0]
            own = inverse[first:last].clone(memory_format=torch.contiguous_format)
            if is_blocks:
                result.matrix.blocks = own
            else:
                result.matrix.tail = own
            first = last
    if highest and any(torch.stack(highest).tolist()):  # one host–device synchronisation for all batches
        for members, level in zip(batches.values(), levels, strict=True):
            _note_raises(members, level)
    return results


def _note_raises(members: Sequence[_Part], level: Tensor) -> None:
    """Say of each factor of a batch what it took."""
    of_parts = level.split([len(part) for _, _, part, _ in members])
    worst = torch.stack([of_part.amax() for of_part in of_parts]).tolist()
    for (result, *_), level_of in zip(members, worst, strict=True):
        result.raised = result.raised or level_of > 0
        result.failed = result.failed or level_of == _NOT_POSITIVE


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
    damped = blocks.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    factor, info = _cholesky(damped)
    bad = info.nonzero().flatten()  # a host–device synchronisation, once a refresh: most often it is empty
    if not len(bad):
        inverse = _from_cholesky(factor)
        return inverse, (~inverse.isfinite().flatten(1).all(-1)).int() * _NOT_POSITIVE
    level = torch.zeros_like(info)
    for attempt in range(1, len(DAMPING_RAISES)):
        retry = blocks[bad]
        retry.diagonal(dim1=-2, dim2=-1).add_((damping[bad] * DAMPING_RAISES[attempt])[:, None])
        factor[bad], info[bad] = _cholesky(retry)
        level[bad] = attempt
        bad = info.nonzero().flatten()
        if not len(bad):
            break
    # one half-finished factor with a zero on its diagonal, and cholesky_inverse raises for the whole batch
    good, inverse = info == 0, torch.zeros_like(factor)
    if bool(good.any()):
        inverse[good] = _from_cholesky(factor[good])
    good = good & inverse.isfinite().flatten(1).all(-1)
    return inverse, torch.where(good, level, _NOT_POSITIVE)


def _from_cholesky(factor: Tensor) -> Tensor:
    if factor.shape[-1] > 1:
        return torch.cholesky_inverse(factor)
    return factor.square().reciprocal()


def _cholesky(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors and, for each block, 0 or a positive number if it is not positive definite."""
    if blocks.shape[-1] > 1:
        factor, info = torch.linalg.cholesky_ex(blocks)
        return factor, info
    # a vocabulary's worth of 1 x 1 blocks: LAPACK would be called for each
    return blocks.sqrt(), (~(blocks > 0)).flatten().int()
