"""Damped inverse roots of many block-diagonal factors at once, for the scale-free step.

By eigendecomposition of the damped blocks, all of one size in one batch: damped first, since an undamped block of low
rank (3 x 3 kernels on 1 x 1 maps see mostly padding) may not converge in single precision. The damping of a factor is
relative to the mean of its own diagonal, so that the loss's scale does nothing to a root's shape: a factor c times as
large has a p-th inverse root c^(-1/p) times as large.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.inverse import DAMPING_RAISES, NOT_CONVERGED, NOT_POSITIVE, Inverse, solve_blocks


def damped_inverse_roots(factors: Sequence[tuple[BlockDiagonal, float]], root: int) -> list[Inverse]:
    """Take the inverse p-th root of every block of every factor.

    Args:
        factors: pairs of a factor ``M`` and the damping λ, a share of the mean of M's diagonal (each group's own).
        root: p.

    Returns:
        One result a factor, in order: ``(M + λ m I)^(-1/p)`` with ``m = tr(M) / n``.
    """
    relative = [(factor, _relative(factor, damping)) for factor, damping in factors]
    return solve_blocks(relative, partial(_root_batch, root))


def _relative(factor: BlockDiagonal, damping: float) -> Tensor:
    means = factor.group_traces() / factor.layout.size
    # a factor of zeros (a layer whose gradient has vanished) gets the root λ^(-1/p), not a division by 0; and so does
    # one whose squares are so small that most of their digits are lost
    least = torch.finfo(means.dtype).tiny / torch.finfo(means.dtype).eps
    return damping * torch.where(means.abs() > least, means, torch.ones_like(means))


def _root_batch(root: int, blocks: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Return the roots ``(count, s, s)`` and, for each block, the index of the damping raise that worked."""
    damped = blocks / damping[:, None, None]  # in units of the damping: any scale is as good as any other
    damped.diagonal(dim1=-2, dim2=-1).add_(1.0)
    values, vectors, converged = _eigh(damped)
    raises = torch.tensor(DAMPING_RAISES, dtype=blocks.dtype, device=blocks.device) - 1.0
    # rounding may leave an eigenvalue below 0: what a Cholesky factorisation would fail on is told from the least one
    positive = values[:, :1] + raises > 0
    level = torch.where(positive.any(-1), positive.int().argmax(-1), NOT_POSITIVE)
    values = values + raises[level.clamp(max=len(DAMPING_RAISES) - 1)][:, None]
    scaled = values.pow(-1 / root) * damping.pow(-1 / root)[:, None]
    roots = (vectors * scaled[:, None, :]) @ vectors.mT
    level = torch.where(roots.isfinite().flatten(1).all(-1), level, NOT_POSITIVE)
    return roots, torch.where(converged, level, NOT_CONVERGED)


def _eigh(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvalues, eigenvectors and whether they were found, of blocks ``(count, s, s)``."""
    converged = torch.ones(len(blocks), dtype=torch.bool, device=blocks.device)
    if blocks.shape[-1] == 1:
        return blocks[..., 0], torch.ones_like(blocks), converged
    try:
        return *torch.linalg.eigh(blocks), converged
    except RuntimeError:  # what torch's LinAlgError is
        pass
    # one block that does not converge fails the whole batch: take them one by one, and in double precision if need be
    values, vectors = blocks.new_zeros(blocks.shape[:-1]), torch.zeros_like(blocks)
    for i, block in enumerate(blocks):
        found = _eigh_of_one(block)
        if found is None:
            converged[i] = False
        else:
            values[i], vectors[i] = found
    return values, vectors, converged


def _eigh_of_one(block: Tensor) -> tuple[Tensor, Tensor] | None:
    for dtype in (block.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(block.to(dtype))
        except RuntimeError:
            continue
        return values.to(block.dtype), vectors.to(block.dtype)
    return None
