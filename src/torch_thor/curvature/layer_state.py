"""The entries of a layer in the optimizer's state of its weight: creating them, and checking that they are complete.

There are the factor in use and its damped inverse for each side, ``A`` and (unless the layer has A alone) ``G``
(:mod:`torch_thor.curvature.stored_factors`), and numbers (``_NUMBERS``). If several layers are rows of one parameter,
the keys of each have a prefix.
"""

import torch
from torch import Tensor

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
SHARDS = "row_shards"  # the key of the number of shards at whose boundaries the blocks of the rows end


def make_layer_state(layer: LayerCurvature) -> None:
    """Create all missing entries, so that a checkpoint has the same keys and shapes at any time."""
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
    layer.stored.make_zeros(dtype, weight.device)
    state.update({prefix + key: value for key, value in _NUMBERS.items()})
    if layer.stored.side_by_rows:
        state[SHARDS] = 1 if layer.weight_view.shards is None else layer.weight_view.shards.count
    if layer.kind.routed:
        state[prefix + "group_rows_per_term"] = torch.zeros(layer.kind.groups, dtype=dtype, device=weight.device)


def missing_entries(layer: LayerCurvature) -> list[str]:
    """Return the entries of a layer that are missing although others are there."""
    numbers = [*_NUMBERS, "group_rows_per_term"] if layer.kind.routed else list(_NUMBERS)
    keys = [layer.prefix + key for key in numbers]
    own = keys + [key for key in layer.stored.shapes() if key.startswith(layer.prefix)]  # no other layer has them
    if not any(key in layer.state for key in own):
        return []
    later = {layer.prefix + key for key in _LATER}  # created in the next step
    return [key for key in keys + list(layer.stored.shapes()) if key not in layer.state and key not in later]


def misfitting_entry(layer: LayerCurvature) -> tuple[str, tuple[int, ...]] | None:
    """Find a tensor of the layer in the state that has another shape than the layer needs now."""
    for key, shape in layer.stored.shapes().items():
        tensor = layer.state.get(key)
        if tensor is not None and (not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape):
            return key, shape
    return None
