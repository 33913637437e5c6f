"""Damped inverses of many block-diagonal factors at once.

Blocks of one size from all layers are inverted by one batched Cholesky factorisation. A few large kernel launches
replace hundreds of small ones, which is the purpose of the split (Chen et al. 2021, section 3.3).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.precision import ieee_float32

# The factors of the damping that are tried until a block is positive definite.
DAMPING_RAISES = (1.0, 10.0, 100.0)
# The result, in the place of an index of DAMPING_RAISES, for a block that is not positive definite with any of them.
_NOT_POSITIVE = len(DAMPING_RAISES)


@dataclass
class Inverse:
    """The damped inverse of one factor.

    Args:
        matrix: ``(M + damping I)⁻¹`` of each block, row-major; undefined if ``failed``.
        raised: whether the damping of a block had to be raised.
        failed: whether a block was not positive definite even then, or its inverse is not finite.
    """

    matrix: BlockDiagonal
    raised: bool
    failed: bool


# the result to fill in, whether the part is its blocks (or its tail), the part, and the damping of each of its blocks
_Part = tuple[Inverse, bool, Tensor, Tensor]


def damped_inverses(factors: Sequence[tuple[BlockDiagonal, float | Tensor]]) -> list[Inverse]:
    """Invert every block of every factor, in one batch for each block size.

    Args:
        factors: pairs of a factor and the damping that is added to its diagonal (``√(λ/T)``): a number, or one for each
            of its groups, ``(groups,)``.

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
    levels: list[Tensor] = []  # for each batch, the index of the damping raise with which each block was inverted
    highest: list[Tensor] = []
    for (_, _, device), members in batches.items():
        results_of, are_blocks, parts, dampings = zip(*members, strict=True)
        with ieee_float32(device.type):
            inverse, level = _invert_batch(torch.cat(parts), torch.cat(dampings))
        levels.append(level)
        highest.append(level.amax().to(levels[0].device))
        first = 0
        for result, is_blocks, part in zip(results_of, are_blocks, parts, strict=True):
            # A copy, because a view would keep the whole batch alive, and would be saved with all of it. Row-major,
            # which LAPACK's results are not: checkpoints may lose strides, on which the rounding of products depends.
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
    """Record for each factor of a batch whether damping was raised and whether the inversion failed."""
    of_parts = level.split([len(part) for _, _, part, _ in members])
    worst = torch.stack([of_part.amax() for of_part in of_parts]).tolist()
    for (result, *_), level_of in zip(members, worst, strict=True):
        result.raised = result.raised or level_of > 0
        result.failed = result.failed or level_of == _NOT_POSITIVE


def relative_damping(factor: BlockDiagonal, damping: float) -> Tensor:
    """Return the damping of a factor relative to its mean diagonal.

    Args:
        factor: the factor.
        damping: λ.

    Returns:
        ``λ · tr(M) / n`` of each group, ``(groups,)``; λ itself for a factor of zeros (of a layer whose inputs are
        zeros), and for one whose elements are so small that they have lost most of their digits.
    """
    means = factor.group_traces() / factor.layout.size
    least = torch.finfo(means.dtype).tiny / torch.finfo(means.dtype).eps
    return damping * torch.where(means.abs() > least, means, torch.ones_like(means))


def _invert_batch(blocks: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses ``(count, s, s)`` and, for each block, the index of the damping raise that worked."""
    damped = blocks.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    factor, info = _cholesky(damped)
    bad = info.nonzero().flatten()  # a host–device synchronisation, once per batch; most often it is empty
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
    # cholesky_inverse raises for the whole batch if one factor is incomplete, with a zero on its diagonal
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
    # LAPACK would be called for each 1 x 1 block, of which an embedding has as many as tokens
    return blocks.sqrt(), (~(blocks > 0)).flatten().int()
