"""Operations on batches, which are trees of tensors: cutting into micro-batches, and moving to a device."""

from typing import Any

import torch

from torch_thor.torch_internals import tree_flatten, tree_map, tree_unflatten


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into micro-batches of samples, as `torch.Tensor.chunk` does.

    Args:
        batch: A tree of tensors with the samples in their first dimension.
        parts: Number of parts; the result may have fewer if the batch has few samples.

    Returns:
        Trees of the same structure, with views of the tensors.
    """
    leaves, shape = tree_flatten(batch)
    chunks = zip(*(leaf.chunk(parts) for leaf in leaves), strict=True)
    return [tree_unflatten(list(some), shape) for some in chunks]


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a tree of tensors.

    Args:
        batch: The tree.
        device: The device.

    Returns:
        The tree on that device.
    """
    return tree_map(lambda leaf: leaf.to(device), batch)
