"""The factors of fused experts, each of which has its own rows.

The stored factors of expert e are ``√T_e · A_e`` and ``√T_e · G_e``, see :mod:`torch_thor.curvature.kinds.experts`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal

Factors = tuple[BlockDiagonal, ...]


def weighted_factors(sums: Factors, rows: Sequence[int], terms: int | None, before: Factors | None) -> Factors:
    """Turn the sums of a step into the factors of the experts.

    Args:
        sums: ``Σ a aᵀ`` and ``Σ g gᵀ`` of each expert; changed in place.
        rows: R_e of each expert.
        terms: N, the number of loss terms; None where A alone is gathered, which is then not weighted with T.
        before: the factors in use; None before the first refresh.

    Returns:
        ``√T_e · A_e`` and ``√T_e · G_e``, or ``A_e`` alone. An expert without rows keeps the factors in use, or zeros
        before it has had any rows.
    """
    counts = sums[0].blocks.new_tensor(rows)
    # √T_e / R_e, or 1 / R_e
    scales = counts.clamp(min=1).reciprocal() if terms is None else (counts * terms).clamp(min=1).rsqrt()
    for factor in sums:
        factor.scale_groups_(scales)
    if before is None:
        return sums
    return tuple(new.where_groups(counts > 0, old) for new, old in zip(sums, before, strict=True))


def group_rows_per_term(rows: Sequence[int], terms: int, before: Tensor) -> Tensor:
    """Return T of each expert.

    Args:
        rows: R_e of each expert.
        terms: N, the number of loss terms.
        before: T of the factors in use, ``(E,)``; 0 where there are none.

    Returns:
        R_e / N, ``(E,)``; the previous value for an expert without rows.
    """
    now = before.new_tensor(rows) / terms
    return torch.where(now > 0, now, before)


def bias_scales(rows_per_term: Tensor) -> Tensor:
    """Return the factor of the natural gradient of a bias: 1 / T, of which its G contains one ``√T``, and its A none.

    Args:
        rows_per_term: T of each expert, ``(E,)``; 0 for an expert that takes its plain gradient.

    Returns:
        ``1 / √T``, ``(E,)``; 1 where T is 0.
    """
    return torch.where(rows_per_term > 0, rows_per_term, 1.0).rsqrt()


def plain_where_unknown(factors: Factors, inverses: Factors) -> Factors:
    """Replace the inverses of experts that have never had a row by identities, so that they take the plain gradient.

    The damped inverse of their factors, which are zeros, would be ``I / √λ``.

    Args:
        factors: the factors, as :func:`weighted_factors` returns them.
        inverses: their damped inverses.

    Returns:
        The inverses, with identities for such experts.
    """
    unknown: Tensor = factors[0].group_traces() == 0
    identity = [BlockDiagonal.identities(i.layout, dtype=i.blocks.dtype, device=i.blocks.device) for i in inverses]
    return tuple(plain.where_groups(unknown, inverse) for plain, inverse in zip(identity, inverses, strict=True))
