"""Polar factors ``U Vᵀ`` of many matrices at once, each split into blocks of rows.

Each block is orthogonalised separately: with ``s`` rows per block, a matrix of m rows and n columns
costs ``m n s`` operations instead of ``m² n``. Blocks of one size, from all matrices of a shape,
are computed in one batch.

- On a CPU they are computed exactly, from the eigendecomposition of the block's Gram matrix,
  ``(X Xᵀ)^(-1/2) X``. For blocks of 128 rows that is cheaper than the five Newton-Schulz iterations
  of Muon.
- On other devices, where many small eigendecompositions are slow, they are computed by matrix
  products, with the coefficients of Polar Express (Amsel et al. 2025, arXiv 2505.16932); for
  float32 matrices in bfloat16.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockSizes, ieee_float32, product

# Coefficients of a X + (b X Xᵀ + c (X Xᵀ)²) X in each iteration, which are optimal for singular
# values from 0.001 to 1.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115951949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.875, -1.25, 0.375),
)
# A safety margin: the iteration diverges for a singular value that rounding has made larger than 1.
_MARGIN = {torch.bfloat16: 1.05, torch.float32: 1.01, torch.float64: 1.01}

# Eigenvalues of a Gram matrix below this number of rounding errors of the largest are noise. They
# are raised to that limit, so that the singular values of their directions stay below 1.
_NOISE = 32.0


def unit_polars(
    matrices: Sequence[Tensor], rows: int | None, limits: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Return the polar factors of batches of wide matrices, or of their row blocks, with norm 1.

    ``limits``: numbers by which the matrices of each batch are multiplied.
    """
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        alike[matrix.dtype, matrix.device, matrix.shape[1:]].append(i)
    polars = orthogonalise([_joined(matrices, each) for each in alike.values()], rows)
    units = list(matrices)
    for members, polar in zip(alike.values(), polars, strict=True):
        # clamped for matrices of zeros, whose step is zero
        norms = torch.linalg.matrix_norm(polar, keepdim=True).clamp_(
            min=torch.finfo(polar.dtype).tiny
        )
        if limits is not None:
            norms /= _joined(limits, members)[:, None, None]
        # in place: a result of orthogonalise() shares no memory with other tensors
        polar.div_(norms)
        for i, part in zip(members, polar.split([len(matrices[i]) for i in members]), strict=True):
            units[i] = part
    return units


def _joined(tensors: Sequence[Tensor], members: Sequence[int]) -> Tensor:
    """Concatenate some of the tensors."""
    return tensors[members[0]] if len(members) == 1 else torch.cat([tensors[i] for i in members])


def orthogonalise(batches: Sequence[Tensor], rows: int | None = None) -> list[Tensor]:
    """Return the polar factor of every matrix, or of each of its blocks of rows."""
    polars = [matrices.new_empty(matrices.shape) for matrices in batches]
    alike: defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = (
        defaultdict(list)
    )
    for matrices, into in zip(batches, polars, strict=True):
        for run in BlockSizes.of(matrices.shape[1], rows).runs:
            blocks = run.of(matrices, 1).flatten(0, 1)
            alike[run.size, matrices.dtype, matrices.device].append((blocks, run.of(into, 1)))
    # a matrix is on the device of the others, as a rule: their precision is chosen once
    for device_type in {matrices.device.type for matrices in batches}:
        with ieee_float32(device_type):
            for (*_, device), members in alike.items():
                if device.type == device_type:
                    of_blocks = _polar([blocks for blocks, _ in members])
                    for (_, into), polar in zip(members, of_blocks, strict=True):
                        into.copy_(polar.reshape(into.shape))
    return polars


def _polar(parts: list[Tensor]) -> list[Tensor]:
    """Return the polar factors of batches ``(count, rows, columns)`` with equally many rows.

    There are no more rows than columns.
    """
    if parts[0].device.type != "cpu":
        dtype = torch.bfloat16 if parts[0].dtype == torch.float32 else parts[0].dtype
        return [_by_products(_with_largest_entry_1(part), dtype) for part in parts]
    roots = _roots(torch.cat([product(part, part.mT) for part in parts]))
    if roots is None:
        return [_one_by_one(_with_largest_entry_1(part)) for part in parts]
    return [
        product(root, part)
        for root, part in zip(roots.split(list(map(len, parts))), parts, strict=True)
    ]


def _one_by_one(units: Tensor) -> Tensor:
    """Return the polar factors of blocks with the largest entry 1, or of zeros, block by block."""
    polars = torch.zeros_like(units)
    for i, unit in enumerate(units):
        if bool(unit.any()):
            root = _roots((unit @ unit.mT)[None])
            polars[i] = _by_products(unit[None], unit.dtype)[0] if root is None else root[0] @ unit
    return polars


def _with_largest_entry_1(blocks: Tensor) -> Tensor:
    return blocks / blocks.abs().amax(dim=(-2, -1), keepdim=True).clamp(
        min=torch.finfo(blocks.dtype).tiny
    )


def _roots(grams: Tensor) -> Tensor | None:
    """Return the inverse square roots of Gram matrices ``(count, rows, rows)``.

    They are None if they cannot be computed.
    """
    info = torch.finfo(grams.dtype)
    if grams.shape[-1] == 1:
        values, vectors = grams[..., 0], torch.ones_like(grams)
    else:
        try:
            values, vectors = torch.linalg.eigh(grams)
        except RuntimeError:  # LinAlgError, which is raised for the whole batch if one block fails
            return None
    largest = values[:, -1:]
    least, most = torch.aminmax(largest)
    if not (float(least) > info.tiny / info.eps**2 and float(most) < info.max * info.eps):
        return None
    # of matrices with rows of zeros, from LAPACK of MKL
    if not math.isfinite(float(values.sum() + vectors.sum())):
        return None
    noise = (_NOISE * info.eps) * largest
    return product(vectors * values.maximum(noise).rsqrt()[:, None, :], vectors.mT)


def _by_products(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the polar factors of blocks with the largest entry 1, or of zeros, by products."""
    norms: Tensor = torch.linalg.matrix_norm(blocks, keepdim=True).clamp(min=0.5)
    margin = _MARGIN[dtype]
    x: Tensor = (blocks / (norms * margin)).to(dtype)
    for i, (a, b, c) in enumerate(_POLAR_EXPRESS):
        if i < len(_POLAR_EXPRESS) - 1:
            a, b, c = a / margin, b / margin**3, c / margin**5
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(blocks.dtype)
