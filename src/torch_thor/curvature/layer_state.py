"""The entries of a layer in the optimizer's state of its weight: creating them, and checking that they are complete.

There are the factor in use and its damped inverse for each side, ``A`` and (unless the layer has A alone) ``G``, as
``blocks`` and ``tail`` of :class:`torch_thor.curvature.blocks.BlockDiagonal`; and numbers (``_NUMBERS``). If several
layers are rows of one parameter, the keys of each have a prefix.
"""

from typing import Any

import torch

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.layer import NO_CHANGE_YET, LayerCurvature
from torch_thor.curvature.precision import factor_dtype

# the numbers in the state, with their initial values
_NUMBERS = {
    "rows_per_term": 0.0,
    "refreshes": 0,
    "stopped": 0,
    "due": 1,
    "idle": 0,
    "uncalled": 0,
    "last_trace_change": NO_CHANGE_YET,
}
_LATER = ("idle", "uncalled")  # entries that earlier versions did not have


def make_layer_state(layer: LayerCurvature) -> None:
    """Create all missing entries, so that a checkpoint has the same keys and shapes at any time.

    A frozen weight has no entries until it is trained.

    Args:
        layer: the layer, whose view of the weight is bound to the state.
    """
    prefix, state = layer.prefix, layer.state
    if prefix + _LATER[-1] in state:
        return
    if prefix + "refreshes" in state:  # the state of an earlier version
        for key in _LATER:
            state.setdefault(prefix + key, _NUMBERS[key])
        return
    weight = layer.weight
    if not weight.requires_grad:
        return
    dtype = factor_dtype(weight.dtype)
    for side, layout in layer.layouts().items():
        for key in (prefix + side, f"{prefix}{side}_inverse"):
            zeros = BlockDiagonal.zeros(layout, dtype=dtype, device=weight.device)
            state[key] = zeros.blocks
            if zeros.tail is not None:
                state[f"{key}_tail"] = zeros.tail
    state.update({prefix + key: value for key, value in _NUMBERS.items()})
    if layer.kind.routed:
        state[prefix + "group_rows_per_term"] = torch.zeros(layer.kind.groups, dtype=dtype, device=weight.device)


def missing_entries(layer: LayerCurvature) -> list[str]:
    """Return the entries of a layer that are missing although others are there.

    Args:
        layer: the layer.

    Returns:
        Their keys; an empty list if the state has all entries of the layer or none.
    """
    keys = list(_NUMBERS)
    for side, layout in layer.layouts().items():
        for matrix in (side, f"{side}_inverse"):
            keys += [matrix, f"{matrix}_tail"] if layout.tail else [matrix]
    keys += ["group_rows_per_term"] if layer.kind.routed else []
    absent = [layer.prefix + key for key in keys if layer.prefix + key not in layer.state]
    later = {layer.prefix + key for key in _LATER}  # created in the next step
    return [] if len(absent) == len(keys) else [key for key in absent if key not in later]


def stored_tensors(layer: LayerCurvature) -> dict[str, tuple[Any, Any]]:
    """Return the tensors of the factors and inverses in the state, without checking their shapes.

    Args:
        layer: the layer.

    Returns:
        Blocks and tail of each matrix (``"A"``, ``"A_inverse"`` and so on); None for a missing entry.
    """
    matrices = [matrix for side in layer.sides for matrix in (side, f"{side}_inverse")]
    keys = {matrix: layer.prefix + matrix for matrix in matrices}
    return {matrix: (layer.state.get(key), layer.state.get(f"{key}_tail")) for matrix, key in keys.items()}
