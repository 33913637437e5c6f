"""Weights that compute several projections at once, as ``split_rows`` declares them.

The scale-free step orthogonalises the rows of each projection by themselves.
"""

import gc
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from torch_thor.curvature.geometry import Geometry, matrix_of
from torch_thor.curvature.kinds import class_name_of, kind_of, parameter_names_of

# The entry of a module with the argument ``sizes`` of ``split_rows``. It belongs to the module, so
# it is copied, pickled and sharded with it.
_DECLARED = "_torch_thor_row_split"
Declared = int | tuple[int, ...]


@dataclass(frozen=True)
class RowSplit:
    """The rows of a weight that belong to each of several projections."""

    sizes: tuple[int, ...]  # the numbers of rows of the projections
    # 1: all rows of the first, then all of the next; n: they take turns n times, as in each head
    turns: int = 1

    def rows(self) -> list[Tensor]:
        """Return the indices of the rows of each projection, in increasing order."""
        by_turn = torch.arange(sum(self.sizes), device="cpu").view(self.turns, -1)
        of_projections = by_turn.split([size // self.turns for size in self.sizes], dim=1)
        return [rows.flatten() for rows in of_projections]


def split_rows(module: nn.Module, sizes: Sequence[int] | int) -> None:
    """Declare that a layer computes several projections at once.

    ThorMuon then orthogonalises them apart.

    ``split_rows(block.attn.qkv, 3)`` for the query, key and value of a fused linear layer, or
    ``split_rows(block.attn.qkv, (768, 128, 128))`` where they differ in size. The projections of
    ``torch.nn.MultiheadAttention``, of the attention of GPT-2, GPT-NeoX and Bloom in transformers
    and of ``timm.layers.Attention`` are known; ``split_rows(layer, 1)`` makes them one matrix
    again. It holds for optimizers that are made afterwards, and belongs to the module: copies and
    pickles of it have it too, and ``fully_shard`` keeps it.

    Args:
        module: a layer whose weight is one matrix, such as a linear layer or a convolution with
            ``groups=1``.
        sizes: the numbers of outputs of the projections, in their order; or the number of
            projections, which then have equally many.

    Raises:
        ValueError: the sizes are no positive whole numbers, or the layer's weight is not one
            matrix. An optimizer raises it when it is made, where the sizes do not fit the outputs.
        RuntimeError: a ThorMuon that is in use trains the layer with other projections.
        TypeError: ``module`` is not a module.
    """
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"split_rows(module={module!r}): must be a layer of the model, a torch.nn.Module; give "
            "the module, not its name or its weight"
        )
    declared = _checked(sizes)
    # a lazy layer has no shape yet; the optimizer looks at it
    if not isinstance(_weight_of(module), UninitializedParameter):
        geometry = geometry_of(module)
        if geometry is None:
            raise ValueError(
                f"split_rows(module={class_name_of(module)}): must be a layer whose weight is one "
                "matrix, with the outputs as its rows or columns; give a linear layer, or a "
                "convolution with groups=1, itself and no module around it"
            )
        _check_not_taken(module, declared, geometry.outputs)
    setattr(module, _DECLARED, declared)


def declared_of(module: nn.Module) -> Declared | None:
    """Return what ``split_rows`` has declared of a module."""
    declared: Declared | None = vars(module).get(_DECLARED)
    return declared


def sizes_of(declared: Declared, outputs: int) -> tuple[int, ...] | None:
    """Return the numbers of rows of declared projections; None if the outputs have others."""
    if isinstance(declared, tuple):
        return declared if sum(declared) == outputs else None
    return None if outputs % declared else (outputs // declared,) * declared


def geometry_of(module: nn.Module) -> Geometry | None:
    """Return the weight of a module as one matrix.

    None if it is none, or its outputs are no rows or columns of the weight.
    """
    weight = _weight_of(module)
    # a module around a layer may show the weight of that
    if not isinstance(weight, Tensor) or not _has_parameter_like(module, weight):
        return None
    kind = kind_of(module)
    if kind is not None and kind.diagonal_input:
        return None
    geometry = (
        matrix_of(module, parameter_names_of(module)[0], weight) if kind is None else kind.geometry
    )
    if geometry is None or geometry.groups > 1:
        return None
    is_by_columns = geometry.taps > 0 or (geometry.transposed and weight.dim() == 2)
    is_by_rows = geometry.is_by_rows(tuple(weight.shape)) and not geometry.transposed
    return geometry if is_by_columns or is_by_rows else None


def _weight_of(module: nn.Module) -> Any:
    return getattr(module, parameter_names_of(module)[0], None)


def _has_parameter_like(module: nn.Module, weight: Tensor) -> bool:
    """Return whether a module has the weight, or computes it (pruning, a parametrization)."""
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    return nn.utils.parametrize.is_parametrized(module) or weight.shape in shapes


def _checked(sizes: Any) -> Declared:
    """Return the sizes of projections, or their number; ValueError for what is none."""
    number = _whole_number(sizes)
    if number is not None:
        return number
    is_several = isinstance(sizes, Iterable) and getattr(sizes, "ndim", 1) == 1
    numbers = [_whole_number(size) for size in sizes] if is_several else []
    known = tuple(number for number in numbers if number is not None)
    if not known or len(known) < len(numbers):
        raise ValueError(
            f"sizes={sizes!r}: must be whole numbers ≥ 1, the outputs of each projection, or one, "
            "the number of projections; give (d, d, d), or 3 for thirds"
        )
    return known


def _whole_number(value: Any) -> int | None:
    """Return a number ≥ 1, which may be one of NumPy or a tensor without dimensions."""
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
    if is_bool or getattr(value, "ndim", 0) > 0:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if number >= 1 else None


@dataclass(eq=False)
class Taken:
    """The projections that an optimizer took from each module when it was made."""

    splits: Mapping[nn.Module, RowSplit]


# those of the optimizers that exist
_TAKEN: WeakSet[Taken] = WeakSet()


def take(splits: Mapping[nn.Module, RowSplit]) -> Taken:
    """Note what an optimizer has taken, for as long as it keeps the result."""
    taken = Taken(splits)
    _TAKEN.add(taken)
    return taken


def _check_not_taken(module: nn.Module, declared: Declared, outputs: int) -> None:
    """Raise an error if an optimizer would not follow a declaration."""
    sizes = sizes_of(declared, outputs)
    if sizes is None:  # the next optimizer refuses them, because it knows the name of the layer
        return

    def others() -> list[RowSplit]:
        splits = [taken.splits[module] for taken in _TAKEN if module in taken.splits]
        return [split for split in splits if split != RowSplit(sizes)]

    if others():
        gc.collect()  # one that nothing refers to any more is not in use
    for other in others():
        raise RuntimeError(
            f"sizes={declared}: must be declared before the optimizer is made, and a ThorMuon that "
            f"is in use trains this layer with {other.sizes}; call split_rows before it is made, "
            "or delete that optimizer first"
        )
