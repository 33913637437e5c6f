"""Factors of layers that are many in one: experts, each with rows of its own.

What is kept of expert e is ``√T_e · A_e`` and ``√T_e · G_e``, see :mod:`torch_thor.curvature.kinds.experts`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal

Factors = tuple[BlockDiagonal, ...]


def weighted_factors(sums: Factors, rows: Sequence[int], terms: int | None, before: Factors | None) -> Factors:
    """Turn the sums of a step into the factors of its experts.

    Args:
        sums: ``Σ a aᵀ`` and ``Σ g gᵀ`` of each expert; used up.
        rows: R_e of each.
        terms: N; None for A alone, where there is nothing for T to weigh.
        before: the factors in use, if there are any.

    Returns:
        ``√T_e · A_e`` and ``√T_e · G_e``, or ``A_e``; of an expert without rows those in use, zeros before there are
        any.
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
        rows: R_e of each.
        terms: N.
        before: T of the factors in use, 0 where there are none.

    Returns:
        ``(E,)``: R_e / N, or what it was for an expert without rows.
    """
    now = before.new_tensor(rows) / terms
    return torch.where(now > 0, now, before)


def bias_scales(rows_per_term: Tensor) -> Tensor:
    """Return what is left of 1 / T for a bias: its A is 1, and has no ``√T`` in it.

    Args:
        rows_per_term: T of each expert, ``(E,)``; 0 for one that takes its plain gradient.

    Returns:
        ``1 / √T``, ``(E,)``.
    """
    return torch.where(rows_per_term > 0, rows_per_term, 1.0).rsqrt()


def plain_where_unknown(factors: Factors, inverses: Factors) -> Factors:
    """Have an expert that has never had a row take its plain gradient: the inverse of its zeros would be ``I / λ``.

    Args:
        factors: as :func:`weighted_factors` gives them.
        inverses: their damped inverses.

    Returns:
        The inverses, with identities for such experts.
    """
    unknown: Tensor = factors[0].group_traces() == 0
    identity = [BlockDiagonal.identities(i.layout, dtype=i.blocks.dtype, device=i.blocks.device) for i in inverses]
    return tuple(plain.where_groups(unknown, inverse) for plain, inverse in zip(identity, inverses, strict=True))
