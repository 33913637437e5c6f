"""What torch's ``load_state_dict`` gets wrong for state that is not of the parameter's dtype."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from torch_thor.curvature.layer import LayerCurvature


def without_callables(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Leave callables out of the groups: they are the program's, not the checkpoint's.

    Args:
        state_dict: of an optimizer.

    Returns:
        A state dict that ``torch.load(weights_only=True)`` takes.
    """
    groups = [{k: v for k, v in group.items() if not callable(v)} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


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
            found = layer.state.get(key)
            needed = layout.shapes()[0]
            if found is not None and tuple(found.shape) != needed:
                raise ValueError(
                    f"layer {layer.name!r}: the factor {key} in the state dict has blocks of shape "
                    f"{tuple(found.shape)}, this model and split_dim need {needed}; load it into the model and with "
                    f"the split_dim that it was saved with"
                )
