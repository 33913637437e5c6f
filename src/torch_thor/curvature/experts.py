"""The factors of fused experts, each of which has its own rows.

The stored factors of expert e are ``√T_e · A_e`` and ``√T_e · G_e``, see :mod:`torch_thor.curvature.kinds.experts`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.owned_blocks import OwnedBlocks

Factors = tuple[BlockDiagonal, ...]
Stored = BlockDiagonal | OwnedBlocks


def weight_(sums: Factors, rows: Sequence[int], terms: int | None) -> None:
    """Turn the sums of a step into the factors of the experts, in place.

    Args:
        sums: ``Σ a aᵀ`` and ``Σ g gᵀ`` of each expert, over the rows of this process; they become
            ``√T_e · A_e`` and ``√T_e · G_e``, or ``A_e`` alone. Those of an expert without rows stay zeros.
        rows: R_e of each expert, of all processes.
        terms: N, the number of loss terms of all processes; None where A alone is gathered, which is then not weighted
            with T.
    """
    counts = sums[0].blocks.new_tensor(rows)
    # √T_e / R_e, or 1 / R_e
    scales = counts.clamp(min=1).reciprocal() if terms is None else (counts * terms).clamp(min=1).rsqrt()
    for factor in sums:
        factor.scale_groups_(scales)


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


def plain_where_unknown(traces: Sequence[float], inverses: Sequence[Stored]) -> list[Stored]:
    """Replace the inverses of experts that have never had a row by identities, so that they take the plain gradient.

    The damped inverse of their factors, which are zeros, would be ``I / √λ``.

    Args:
        traces: the trace of the new A of each expert; 0 for one that has never had a row.
        inverses: the damped inverses of the new factors.

    Returns:
        The inverses, with identities for such experts.
    """
    unknown = torch.tensor([trace == 0 for trace in traces], device=inverses[0].parts()[0].device)
    return [inverse.with_identities(unknown) for inverse in inverses]
