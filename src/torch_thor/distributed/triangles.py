"""Symmetric blocks as packed lower triangles, which are half as large to send."""

import torch
from torch import Tensor


def packed_size(size: int) -> int:
    """Return the number of elements of a packed block."""
    return size * (size + 1) // 2


def pack(blocks: Tensor, into: Tensor) -> None:
    """Write the lower triangles of symmetric blocks into a flat tensor."""
    lower, _ = _places(blocks)
    if into.dtype != blocks.dtype:
        into.view(len(blocks), -1).copy_(blocks.flatten(1).index_select(1, lower))
        return
    torch.index_select(blocks.flatten(1), 1, lower, out=into.view(len(blocks), -1))


def unpack_(blocks: Tensor, packed: Tensor) -> None:
    """Overwrite symmetric blocks with those that a flat tensor holds as lower triangles."""
    lower, upper = _places(blocks)
    triangles, whole = packed.view(len(blocks), -1).to(blocks.dtype), torch.empty_like(blocks.flatten(1))
    whole.index_copy_(1, lower, triangles)
    whole.index_copy_(1, upper, triangles)
    blocks.copy_(whole.view(blocks.shape))


def _places(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the lower triangle in a flat block, row by row, and of the elements that mirror it."""
    size = blocks.shape[-1]
    row, column = torch.tril_indices(size, size, device=blocks.device)
    return row * size + column, column * size + row
