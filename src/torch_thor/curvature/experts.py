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
    """Turn the sums of a step into the factors of the experts, in place."""
    counts = sums[0].blocks.new_tensor(rows)
    # √T_e / R_e, or 1 / R_e
    scales = counts.clamp(min=1).reciprocal() if terms is None else (counts * terms).clamp(min=1).rsqrt()
    for factor in sums:
        factor.scale_groups_(scales)


def group_rows_per_term(rows: Sequence[int], terms: int, before: Tensor) -> Tensor:
    """Return T of each expert."""
    now = before.new_tensor(rows) / terms
    return torch.where(now > 0, now, before)


def bias_scales(rows_per_term: Tensor) -> Tensor:
    """Return the factor of a bias's natural gradient: 1 / T, of which its G contains one ``√T``, and its A none."""
    return torch.where(rows_per_term > 0, rows_per_term, 1.0).rsqrt()


def plain_where_unknown(traces: Sequence[float], inverses: Sequence[Stored]) -> list[Stored]:
    """Replace the inverses of experts that have never had a row by identities, so that they take the plain gradient."""
    # The damped inverse of their factors, which are zeros, would be `I / √λ`.
    unknown = torch.tensor([trace == 0 for trace in traces], device=inverses[0].parts()[0].device)
    return [inverse.with_identities(unknown) for inverse in inverses]
