"""Spectral norms of factors, and the share of the norm lost when a factor is split into blocks.

The spectral norm of a factor is the largest eigenvalue of its blocks. Lanczos' method computes it
for all blocks of one size at once. ``torch.lobpcg`` fails on rank-one and zero matrices, and a
batched eigendecomposition takes hundreds of times longer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks, ieee_float32

# The relative residual at which to stop, far below the 1 % of the choice. It bounds the error,
# which is most often about its square.
TOLERANCE = 1e-3
# Enough steps even without a gap between eigenvalues: the expected relative error is below
# 0.103 (ln(n (m-1)^2) / (m-1))^2, which is 0.0007 for n = 8192 rows and m = 256 steps (Kuczynski
# and Wozniakowski, SIAM J. Matrix Anal. Appl. 1992, theorem 3.2).
MAX_STEPS = 256
_CHECK_EVERY = 8


@torch.no_grad()
def largest_eigenvalues(matrices: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Return the largest eigenvalue of positive semidefinite matrices, by Lanczos' method.

    The matrices are symmetric.
    """
    # Every new basis vector is orthogonalised twice against all previous ones, so that rounding
    # causes no spurious eigenvalues. The start vector is drawn from a separate random generator.
    count, n, _ = matrices.shape
    # λ_max / n ≤ scale ≤ λ_max: no overflow, no underflow
    scale = matrices.diagonal(dim1=-2, dim2=-1).amax(-1)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))[:, None]
    steps = min(n, MAX_STEPS)
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(count, n, generator=generator, dtype=matrices.dtype, device="cpu")
    vector = torch.nn.functional.normalize(start, dim=-1).to(matrices.device)
    basis = matrices.new_zeros(count, steps, n)
    tridiagonal = matrices.new_zeros(count, steps + 1, steps + 1)
    noise = 10 * torch.finfo(matrices.dtype).eps
    ritz = matrices.new_zeros(count)
    with ieee_float32(matrices.device.type):
        for step in range(steps):
            basis[:, step] = vector
            known = basis[:, : step + 1]
            image = torch.bmm(matrices, vector[:, :, None])[..., 0] / scale
            tridiagonal[:, step, step] = (image * vector).sum(-1)
            length = image.norm(dim=-1)
            for _ in range(2):
                image = image - torch.bmm(known.mT, torch.bmm(known, image[:, :, None]))[..., 0]
            rest = image.norm(dim=-1)
            if (step + 1) % _CHECK_EVERY == 0 or step + 1 == steps:
                values, vectors = torch.linalg.eigh(tridiagonal[:, : step + 1, : step + 1].cpu())
                ritz = values[:, -1].to(matrices)
                residual = rest * vectors[:, -1, -1].abs().to(matrices)
                # a host–device synchronisation every eight steps
                if bool((residual <= tolerance * ritz).all()):
                    break
            # if the vectors so far span an invariant subspace, the rest is noise, and is replaced
            # by zeros
            rest = torch.where(rest > noise * length, rest, torch.zeros_like(rest))
            tridiagonal[:, step, step + 1] = tridiagonal[:, step + 1, step] = rest
            vector = torch.where(rest[:, None] > 0, image / rest[:, None], torch.zeros_like(image))
    return ritz * scale[:, 0]


def spectral_losses(matrix: Blocks, split_dims: Sequence[int]) -> tuple[float, ...]:
    """Return ``L = 1 - |Â|₂ / |A|₂`` for several block sizes of Â."""
    unsplit = _norm(matrix.parts)
    norms = torch.stack(
        [_norm([c for part in matrix.parts for c in _cut(part, size)]) for size in split_dims]
    )
    losses = torch.where(unsplit == 0, torch.zeros_like(norms), 1 - norms / unsplit)
    return tuple(losses.clamp(0, 1).tolist())


def _norm(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([largest_eigenvalues(part).amax() for part in parts]).amax()


def _cut(blocks: Tensor, size: int) -> list[Tensor]:
    """Return the diagonal blocks, of some size or the rest at the end, of ``(count, n, n)``."""
    count, n, _ = blocks.shape
    if size >= n:
        return [blocks]
    full = n // size * size
    block_sizes = blocks[:, :full, :full].reshape(count, n // size, size, n // size, size)
    squares = block_sizes.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)
    return [squares] if full == n else [squares, blocks[:, full:, full:]]
