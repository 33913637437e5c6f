"""What torch's ``load_state_dict`` gets wrong for state that is not of the parameter's dtype."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.layer import LayerCurvature


def restore_tensors(
    state: Mapping[Tensor, dict[str, Any]], groups: Iterable[dict[str, Any]], saved: dict[str, Any]
) -> None:
    """Put the saved tensors back in the dtype they were saved in, and in the strides that a step makes them with.

    The base class casts every floating-point tensor to the parameter's dtype (pytorch#43706), which would ruin float32
    factors under bfloat16 parameters, and shares tensors with the dict it was given. Strides are not kept by every
    checkpoint format, and products are rounded by them.

    Args:
        state: the optimizer's state, as the base class loaded it; changed in place.
        groups: its parameter groups.
        saved: the state dict.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
    for i, parameter in zip(ids, parameters, strict=True):
        for key, value in saved["state"].get(i, {}).items():
            if isinstance(value, Tensor):
                state[parameter][key] = _as_made(value.detach(), parameter)


def _as_made(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a copy on the parameter's device, with its strides where it has its shape (momentum), else row-major."""
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return torch.empty(value.shape, dtype=value.dtype, device=parameter.device).copy_(value)


def check_factors(layers: Iterable[LayerCurvature]) -> None:
    """Check that loaded factors are of the shapes that their layers need.

    Args:
        layers: the preconditioned layers.

    Raises:
        ValueError: they are not: the state belongs to another model.
    """
    for layer in layers:
        for key, layout in zip(("A", "G"), layer.layouts(), strict=True):
            stored = layer.stored(key)
            found = tuple(None if part is None else tuple(part.shape) for part in stored)
            if stored[0] is not None and found != layout.shapes():
                raise ValueError(
                    f"layer {layer.name!r}: the factor {key} in the state dict has blocks of shapes {found}, this "
                    f"model and split_dim need {layout.shapes()}; load it into the model and with the split_dim that "
                    f"it was saved with"
                )
