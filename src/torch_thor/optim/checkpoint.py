"""What torch's ``load_state_dict`` gets wrong for state that is not of the parameter's dtype."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from torch_thor.curvature.layer import LayerCurvature


def restore_tensors(
    state: Mapping[Tensor, dict[str, Any]], groups: Iterable[dict[str, Any]], saved: dict[str, Any]
) -> None:
    """Put the saved tensors back in the dtype they were saved in.

    The base class casts every floating-point tensor to the parameter's dtype (pytorch#43706), which would ruin float32
    factors under bfloat16 parameters, and shares tensors with the dict it was given.

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
                state[parameter][key] = value.detach().to(parameter.device, copy=True)


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
