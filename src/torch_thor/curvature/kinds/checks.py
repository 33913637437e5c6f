"""Checks whether a registered kind is complete, and whether it fits the weight that it is registered for."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.kinds.base import Kind

METHODS = ("loss_terms", "row_shape", "add_inputs_", "add_outputs_", "to_matrix", "from_matrix_")
_ATTRIBUTES = ("label", "groups", "inputs", "outputs", "diagonal_input", "transposed", "solves_biases", "routed")
REMEDY = "derive it from torch_thor.curvature.LinearKind, or see torch_thor.curvature.Kind for what a kind must define"


def check_complete(owner: Any, who: str, error: type[Exception], names: Sequence[str] = METHODS) -> None:
    """Raise an error for a kind, or a class of kinds, that lacks something every kind has."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise error(f"{who} has no {', '.join(missing)}, which every kind of layer has; {REMEDY}")


def check_fits(kind: Kind, weight: Tensor, biases: Sequence[Tensor], who: str) -> None:
    """Raise an error for a kind whose matrices are not those of its weight."""
    check_complete(kind, who, ValueError, METHODS + _ATTRIBUTES)
    sizes = kind.groups, kind.outputs, kind.inputs
    rule = f"groups={kind.groups}, outputs={kind.outputs}, inputs={kind.inputs}"
    whole = all(isinstance(size, int) and size > 0 for size in sizes)
    if not whole or math.prod(sizes) != weight.numel():
        raise ValueError(
            f"{who} says {rule} of a weight of shape {tuple(weight.shape)}: they must be whole numbers whose product "
            f"is the weight's {weight.numel()} numbers; correct the kind"
        )
    wanted = (kind.groups, kind.inputs, kind.outputs) if kind.transposed else sizes
    found = tuple(kind.to_matrix(torch.empty(weight.shape, device="meta")).shape)  # a tensor without memory
    if found != wanted:
        order = "(groups, inputs, outputs)" if kind.transposed else "(groups, outputs, inputs)"
        raise ValueError(
            f"to_matrix of {who} makes {found} of the weight: with {rule} and transposed={kind.transposed} it must be "
            f"{order} = {wanted}; correct the kind"
        )
    for bias in biases if kind.solves_biases else ():
        if bias.numel() != kind.groups * kind.outputs:
            raise ValueError(
                f"{who} says {rule} and solves_biases=True of a bias of shape {tuple(bias.shape)}: a bias has a "
                f"number for each of the {kind.groups * kind.outputs} outputs; set solves_biases=False if it has not"
            )
