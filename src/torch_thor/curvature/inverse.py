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
    batches: defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[int, int]]] = defaultdict(list)
    for i, (factor, _) in enumerate(factors):
        for j, part in enumerate(factor.parts()):
            batches[part.shape[-1], part.dtype, part.device].append((i, j))
    inverted: dict[tuple[int, int], Tensor] = {}
    levels: dict[tuple[int, int], Tensor] = {}
    for (_, _, device), members in batches.items():
        parts = [factors[i][0].parts()[j] for i, j in members]
        lengths = [len(part) for part in parts]
        damping = torch.cat(
            [
                _of_blocks(factors[i][1], part, factors[i][0].layout.groups)
                for part, (i, _) in zip(parts, members, strict=True)
            ]
        )
        with ieee_float32(device.type):
            inverse, level = _invert_batch(torch.cat(parts), damping)
        for member, piece, its_level in zip(members, inverse.split(lengths), level.split(lengths), strict=True):
            inverted[member] = piece
            levels[member] = its_level.amax()
    worst = dict(zip(levels, _to_host(list(levels.values())), strict=True))
    results = []
    for i, (factor, _) in enumerate(factors):
        keys = [(i, j) for j in range(len(factor.parts()))]
        level_of = max(worst[key] for key in keys)
        # split() gives views into the batch; a layer must not keep the whole batch alive, nor save it with its state.
        # Row-major, which LAPACK's results are not: checkpoints may not keep strides, and products round by them.
        matrix = factor.with_parts([inverted[key].clone(memory_format=torch.contiguous_format) for key in keys])
        results.append(Inverse(matrix, raised=level_of > 0, failed=level_of == _NOT_POSITIVE))
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


def _of_blocks(damping: float | Tensor, part: Tensor, groups: int) -> Tensor:
    if isinstance(damping, Tensor):
        return damping.repeat_interleave(len(part) // groups)
    return part.new_full((len(part),), damping)


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


def _to_host(scalars: list[Tensor]) -> list[int]:
    """Return integers from every device, with one wait a device."""
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for index, scalar in enumerate(scalars):
        by_device[scalar.device].append(index)
    values = [0] * len(scalars)
    for indices in by_device.values():
        for index, value in zip(indices, torch.stack([scalars[i] for i in indices]).tolist(), strict=True):
            values[index] = int(value)
    return values
