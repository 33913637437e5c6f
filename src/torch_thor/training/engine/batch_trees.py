"""Batches as trees of tensors: cut into parts for gradient accumulation, moved to a device."""

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Cut a batch along its samples, as `torch.Tensor.chunk` does.

    Args:
        batch: A tree of tensors with the samples in their first dimension.
        parts: How many; there may be fewer where the batch has few samples.

    Returns:
        Trees of the same shape, with views of the tensors.
    """
    leaves, shape = tree_flatten(batch)
    chunks = zip(*(leaf.chunk(parts) for leaf in leaves), strict=True)
    return [tree_unflatten(list(some), shape) for some in chunks]


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a tree of tensors.

    Args:
        batch: The tree.
        device: Where to.

    Returns:
        The tree there.
    """
    return tree_map(lambda leaf: leaf.to(device), batch)
