"""Collectives of one tensor, by the names that the installed torch has for them.

torch 2.14 warns of the older names.
"""

from typing import Any

from torch import Tensor
from torch import distributed as dist


def _named(new: str, old: str) -> Any:
    return getattr(dist, new if hasattr(dist, new) else old)


def all_gather(output: Tensor, local: Tensor, group: Any = None) -> None:
    """Collect tensors of one size from all processes, one after the other in the output."""
    _named("all_gather_single", "all_gather_into_tensor")(output, local, group=group)


def reduce_scatter(output: Tensor, full: Tensor, group: Any = None, **options: Any) -> Any:
    """Sum a tensor over all processes, each of which gets its part; `options` are torch's."""
    return _named("reduce_scatter_single", "reduce_scatter_tensor")(
        output, full, group=group, **options
    )
